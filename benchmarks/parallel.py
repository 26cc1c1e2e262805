"""A step of a Llama that ranks compute together: Penstock's tensor ranks beside others'.

    python benchmarks/parallel.py [--tensor 2] [--data 2] [--json FILE]

All trainers live in the same processes, start from the same weights, see the same tokens and take
turns; ratios are taken round by round. "torch TP" is torch.distributed.tensor.parallel with the
plan that transformers has for the model, embedding and head whole, under FSDP2 where there are data
ranks; "AutoTP" is DeepSpeed's, with ZeRO-1 where there are data ranks, if that package can be
imported; "whole" computes the whole model on every rank and exchanges nothing; "tensor" is
Penstock, "cut logits" with its `parallel.cut_logits`, "sequence" with the sequences in parts,
"ring" with keys and values that travel around the ranks. All have torch's AdamW or Penstock's. The
loss gap is that to plain torch in one process.

Memory is measured apart, in processes of one trainer each: what their resident peak has above what
they had before the model was built, the largest of all ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure import alone, interleave, launch, machine, ratio, run_rank, write_json
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import penstock

LR, VOCAB = 1e-3, 2048
PENSTOCK: dict[str, dict[str, Any]] = {
    "tensor": {},
    "cut logits": {"parallel": {"cut_logits": True}},
    "sequence": {},
    "ring": {"parallel": {"sequence": "ring"}},
}
Step = Callable[[torch.Tensor], float]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tensor", type=int, default=2, help="ranks that compute one copy")
    add("--data", type=int, default=1, help="copies")
    add("--hidden", type=int, default=512)
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=2, help="sequences of a copy")
    add("--tokens", type=int, default=128, help="of a sequence")
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=3, help="timed steps per trainer and round")
    add("--trainers", nargs="+", default=trainers(), choices=trainers())
    add("--json", help="file for all figures")
    add("--worker", choices=("speed", "memory"), help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def trainers() -> list[str]:
    peers = ["torch TP", "AutoTP"] if importlib.util.find_spec("deepspeed") else ["torch TP"]
    return ["whole", *peers, *PENSTOCK]


def build(options: argparse.Namespace) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=options.tokens,
            use_cache=False,
        )
    )


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), LR, weight_decay=0.01, foreach=False)


# ---- trainers; each takes the sequences of a data rank, and gives their mean loss


def cut_by_torch(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for layer in model.model.layers:
        plan = {f"*.{name}": ColwiseParallel() for name in columns}
        plan |= {f"*.{name}": RowwiseParallel() for name in ("o_proj", "down_proj")}
        parallelize_module(layer, mesh["tensor"], plan)
        if mesh["data"].size() > 1:
            fully_shard(layer, mesh=mesh["data"])
    if mesh["data"].size() > 1:
        fully_shard(model, mesh=mesh["data"])


def by_torch(options: argparse.Namespace, cut: bool) -> Step:
    model = build(options)
    if cut:
        shape = (options.data, options.tensor)
        cut_by_torch(model, init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")))
    optimizer = adamw(model)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def by_deepspeed(options: argparse.Namespace) -> Step:
    import deepspeed  # noqa: PLC0415 - optional, and slow to import

    model = build(options)
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": 1 if options.data > 1 else 0},
        "tensor_parallel": {"autotp_size": options.tensor},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def by_penstock(name: str, options: argparse.Namespace) -> Step:
    axis = "sequence" if name in ("sequence", "ring") else "tensor"
    settings = {
        "strategy": "zero1",
        "mesh": {axis: options.tensor},
        "optimizer": {"type": "AdamW", "lr": LR, "weight_decay": 0.01},
        **PENSTOCK[name],
    }
    engine = penstock.initialize(build(options), settings)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def make(name: str, options: argparse.Namespace) -> Step:
    if name in PENSTOCK:
        return by_penstock(name, options)
    return by_deepspeed(options) if name == "AutoTP" else by_torch(options, name == "torch TP")


# ---- what ranks do


def batches_of(options: argparse.Namespace) -> torch.Tensor:
    shape = (16, options.data, options.batch, options.tokens)
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def speed(options: argparse.Namespace) -> dict[str, Any]:
    batches, mine = batches_of(options), dist.get_rank() // options.tensor
    losses: dict[str, list[float]] = {name: [] for name in options.trainers}
    steps = {name: make(name, options) for name in options.trainers}

    def action(name: str) -> None:
        losses[name].append(steps[name](batches[len(losses[name]) % len(batches)][mine]))

    seconds = interleave(
        {name: lambda name=name: action(name) for name in steps}, options.rounds, options.steps
    )
    for name, seen in losses.items():
        mean = torch.tensor(seen, dtype=torch.float64)
        dist.all_reduce(mean)
        losses[name] = (mean / dist.get_world_size()).tolist()
    one = by_torch(options, cut=False) if dist.get_rank() == 0 else None
    count = len(losses[options.trainers[0]])
    plain = [one(batches[i % len(batches)].flatten(0, 1)) for i in range(count)] if one else []
    return {"seconds": seconds, "losses": losses, "plain": plain}


def memory(options: argparse.Namespace) -> list[int]:
    (name,) = options.trainers
    if name == "AutoTP":
        import deepspeed  # noqa: F401, PLC0415 - so that what it imports is not counted
    batch = batches_of(options)[0, dist.get_rank() // options.tensor]
    return alone(lambda: make(name, options), lambda step: step(batch))


def report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    seconds, plain = figures["seconds"], figures["plain"]
    peers = [name for name in options.trainers if name not in PENSTOCK]
    head = f"{'trainer':<12}{'ms/step':>9}" + "".join(f"{'/ ' + name:>24}" for name in peers)
    print(head + f"{'loss gap':>10}{'peak MiB':>10}")
    for name, times in seconds.items():
        line = f"{name:<12}{1000 * statistics.median(times):>9.1f}"
        for peer in peers:
            median, low, high = ratio(times, seconds[peer])
            line += f"{f'{median:.3f} ({low:.3f}-{high:.3f})':>24}"
        if name == "whole" and options.data > 1:  # its copies part
            line += f"{'':>10}"
        else:
            pairs = zip(figures["losses"][name], plain, strict=True)
            line += f"{max(abs(a - b) / b for a, b in pairs):>10.1e}"
        print(line + f"{max(figures['peaks'][name]) / 2**20:>10.0f}")


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank({"speed": speed, "memory": memory}[options.worker], options)
        return

    def run(worker: str, names: list[str]) -> Any:
        arguments = ["--worker", worker, "--trainers", *names]
        for name, value in vars(options).items():
            if name not in ("json", "worker", "result", "trainers"):
                arguments += [f"--{name}", str(value)]
        print(f"{worker}: {', '.join(names)}", file=sys.stderr, flush=True)
        return launch(__file__, arguments, options.tensor * options.data)

    figures = run("speed", options.trainers)
    figures["peaks"] = {name: run("memory", [name]) for name in options.trainers}
    report(figures, options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})


if __name__ == "__main__":
    main()
