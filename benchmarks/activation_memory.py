"""The memory of a step as the ledger predicts it with activations, beside the resident peak of a
step: a GPT-2 and a Llama of transformers on five meshes, with and without recomputation.

    python benchmarks/activation_memory.py [--meshes T2 P2 T2P2 S2 D2T2P2] [--json FILE]

Each engine trains three steps, so the ledger knows the activations (`step_memory`). Then five more
steps run. "measured" is the median of their resident peaks, each less what the process held besides
the engine before the step; of all ranks, the one with the largest difference from its prediction is
printed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure import launch, machine, peak_bytes, reset_peak, resident_bytes, run_rank, write_json

import penstock

MESHES = {
    "T2": {"tensor": 2},
    "P2": {"pipeline": 2},
    "T2P2": {"tensor": 2, "pipeline": 2},
    "S2": {"sequence": 2},
    "D2T2P2": {"data": 2, "tensor": 2, "pipeline": 2},
}
VOCAB, MIB = 4096, 2**20


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--strategy", default="zero1")
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=256)
    add("--batch", type=int, default=32, help="sequences of a data rank")
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def gpt2(options: argparse.Namespace) -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=options.hidden,
            n_layer=options.layers,
            n_head=4,
            n_positions=options.tokens,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def llama(options: argparse.Namespace) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=options.tokens,
            use_cache=False,
        )
    )


MODELS = {"GPT-2": gpt2, "Llama": llama}


def measured(options: argparse.Namespace, kind: str, recompute: bool) -> dict[str, int]:
    mesh = MESHES[options.meshes[0]]
    torch.manual_seed(0)
    micro = 4 if "pipeline" in mesh else 1
    config: dict[str, Any] = {
        "strategy": options.strategy,
        "mesh": mesh,
        "batch": {"micro": options.batch // micro, "accumulate": micro},
        "optimizer": {"type": "AdamW", "lr": 1e-3},
    }
    if recompute:
        config["activations"] = {"checkpoint": "unit"}
    engine = penstock.initialize(MODELS[kind](options), config)
    tokens = torch.randint(VOCAB, (options.batch, options.tokens))
    for _ in range(3):
        engine.train_batch({"input_ids": tokens, "labels": tokens})
    peaks = []
    for _ in range(5):
        gc.collect()
        besides = resident_bytes() - engine.ledger()["resident"]["engine"]
        reset_peak()
        engine.train_batch({"input_ids": tokens, "labels": tokens})
        peaks.append(peak_bytes() - besides)
    ledger = engine.ledger()
    engine.close()
    entry = ledger["predicted"][options.strategy]
    return {
        "activations": entry["activations"],
        "predicted": entry["step_memory"],
        "measured": int(statistics.median(peaks)),
    }


def work(options: argparse.Namespace) -> dict[str, list[dict[str, int]]]:
    found = {}
    for kind, recompute in itertools.product(options.models, (False, True)):
        one = measured(options, kind, recompute)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, one)
        found[f"{kind}{', recomputed' if recompute else ''}"] = ranks
    return found


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank(work, options)
        return
    # glibc keeps much of the memory of freed tensors, so that a resident peak would tell little.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print(machine())
    print(f"{'MiB':<28}{'activations':>12}{'predicted':>11}{'measured':>10}{'ratio':>7}")
    everything = {}
    for name in options.meshes:
        size = 1
        for axis in MESHES[name].values():
            size *= axis
        arguments = ["--strategy", options.strategy, "--models", *options.models]
        for each in ("hidden", "layers", "tokens", "batch"):
            arguments += [f"--{each}", str(getattr(options, each))]
        found = launch(__file__, [*arguments, "--meshes", name, "--worker"], size)
        everything[name] = found
        for case, ranks in found.items():
            worst = max(ranks, key=lambda one: abs(one["predicted"] / one["measured"] - 1))
            cells = "".join(
                f"{worst[key] / MIB:>{width}.1f}"
                for key, width in (("activations", 12), ("predicted", 11), ("measured", 10))
            )
            ratio = worst["predicted"] / worst["measured"]
            print(f"{name + ' ' + case:<28}{cells}{ratio:>7.2f}", flush=True)
    write_json(options.json, {"machine": machine(), "cases": everything})


if __name__ == "__main__":
    main()
