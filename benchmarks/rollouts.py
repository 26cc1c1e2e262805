"""Generation inside training, and handing weights over, beside plain torch and plain collectives.

    python benchmarks/rollouts.py [--width 768 --layers 8] [--ranks 2] [--rounds 5] [--json FILE]

A Llama trains under zero3. In each round these take turns, on all ranks at once:

- "unsharded": a plain copy of the model generates.
- "resident": the engine's model generates the same inside `inference("resident")`.
- "enter and leave": `inference("resident")` around nothing.
- "weights": a loop over `engine.weights()`, which yields copies.
- "gather": an all-gather of the same bytes in one piece, by the back end "penstock", into memory
  that was used before.
- "gather, new": the same into new memory, as the context must do, which frees it at its end.
- "gather and copy, new": the same, and then a copy of all bytes to new memory.

The peak memory of one loop over weights(), above the memory before it, is measured at the end.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    interleave,
    launch,
    machine,
    peak_bytes,
    ratio,
    reset_peak,
    resident_bytes,
    run_rank,
    write_json,
)

import penstock

PROMPT = 32


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--width", type=int, default=768)
    add("--layers", type=int, default=8)
    add("--batch", type=int, default=8)
    add("--new", type=int, default=16)
    add("--rounds", type=int, default=5)
    add("--bucket-mib", type=int, default=64)
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=options.width,
            intermediate_size=options.width * 3,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 64,
            vocab_size=8192,
            max_position_embeddings=256,
        )
    )


def work(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = build(options)
    plain = copy.deepcopy(model).eval()
    size = sum(one.numel() for one in plain.parameters())
    engine = penstock.initialize(
        model, {"strategy": "zero3", "optimizer": {"type": "SGD", "lr": 0.0}}
    )
    prompts = torch.randint(3, 8000, (options.batch, PROMPT))
    group = dist.new_group(backend="penstock")
    full = torch.zeros(size // options.ranks * options.ranks)
    shard = torch.ones(full.numel() // options.ranks)

    def generate(one: Any) -> torch.Tensor:
        made: torch.Tensor = one.generate(
            prompts, max_new_tokens=options.new, min_new_tokens=options.new, do_sample=False
        )
        return made

    def resident(uses: bool) -> None:
        with engine.inference("resident"):
            if uses:
                generate(model)

    def weights() -> None:
        for _ in engine.weights(bucket_bytes=options.bucket_mib << 20):
            pass

    def gather(new: bool, copies: bool = False) -> None:
        into = torch.empty_like(full) if new else full
        dist.all_gather_into_tensor(into, shard, group=group)
        if copies:
            into.clone()

    def unsharded() -> None:
        generate(plain)

    actions = {
        "unsharded": unsharded,
        "resident": lambda: resident(True),
        "enter and leave": lambda: resident(False),
        "weights": weights,
        "gather": lambda: gather(False),
        "gather, new": lambda: gather(True),
        "gather and copy, new": lambda: gather(True, True),
    }
    seconds = interleave(actions, options.rounds, 1)
    before = resident_bytes()
    reset_peak()
    weights()
    extra = peak_bytes() - before
    engine.close(gather=False)
    return {"seconds": seconds, "extra": extra, "bytes": 4 * size}


def main() -> None:
    options = parse_options()
    if options.worker:
        return run_rank(work, options)
    names = ("ranks", "width", "layers", "batch", "new", "rounds", "bucket_mib")
    given = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    found = launch(__file__, ["--worker", *given], options.ranks)
    seconds = found["seconds"]
    print(f"{machine()}\n{found['bytes'] / 1e6:.0f} MB of parameters, {options.ranks} ranks")
    for name, each in seconds.items():
        print(f"{name:22}{statistics.median(each):8.3f} s")
    for text, one, other in (
        ("speed of resident / unsharded", "unsharded", "resident"),
        ("enter and leave / gather", "enter and leave", "gather"),
        ("enter and leave / gather, new", "enter and leave", "gather, new"),
        ("speed of weights / gather, new", "gather, new", "weights"),
        ("speed of weights / gather and copy, new", "gather and copy, new", "weights"),
    ):
        middle, low, high = ratio(seconds[one], seconds[other])
        print(f"{text}: {middle:.2f} ({low:.2f} to {high:.2f})")
    print(
        f"peak of weights(): {found['extra'] / 1e6:.0f} MB above the memory before, with buckets "
        f"of {(options.bucket_mib << 20) / 1e6:.0f} MB"
    )
    write_json(options.json, {"machine": machine(), "options": vars(options), **found})


if __name__ == "__main__":
    main()
