"""A step of a Llama that ranks compute together: Penstock's tensor ranks beside torch's.

    python benchmarks/parallel.py [--json FILE]

All trainers live in the same processes, start from the same weights, see the same tokens and take
turns; ratios are taken round by round. "torch TP" is torch.distributed.tensor.parallel with the
plan that transformers has for the model, embedding and head whole; "whole" computes the whole model
on every rank and exchanges nothing, "sequence" is Penstock with the sequences in parts. The loss
gap is that to "whole".
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from measure import interleave, launch, machine, ratio, run_rank, write_json
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import penstock

LR = 1e-3
TRAINERS = ("whole", "torch TP", "tensor", "sequence")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--hidden", type=int, default=512)
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=2, help="sequences")
    add("--tokens", type=int, default=128, help="of a sequence")
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=3, help="timed steps per trainer and round")
    add("--trainers", nargs="+", default=TRAINERS, choices=TRAINERS)
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(options: argparse.Namespace) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=2048,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=options.tokens,
            use_cache=False,
        )
    )


def by_torch(model: torch.nn.Module, tensor: bool) -> Callable[..., torch.Tensor]:
    """A step of plain torch, with or without its tensor parallelism."""
    if tensor:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        for layer in model.model.layers:
            plan = {f"*.{name}": ColwiseParallel() for name in columns}
            plan |= {f"*.{name}": RowwiseParallel() for name in ("o_proj", "down_proj")}
            parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.01, foreach=False)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_penstock(model: torch.nn.Module, axis: str) -> Callable[..., torch.Tensor]:
    mesh = {axis: dist.get_world_size()}
    settings = {"strategy": "zero1", "mesh": mesh, "optimizer": {"type": "AdamW", "lr": LR}}
    engine = penstock.initialize(model, settings)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def make(name: str, options: argparse.Namespace) -> Callable[..., torch.Tensor]:
    model = build(options)
    if name in ("tensor", "sequence"):
        return by_penstock(model, name)
    return by_torch(model, name == "torch TP")


def work(options: argparse.Namespace) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    shape = (64, options.batch, options.tokens)
    batches = torch.randint(2048, shape, generator=generator)
    losses: dict[str, list[float]] = {}
    actions = {}
    for name in options.trainers:
        step, seen = make(name, options), losses.setdefault(name, [])

        def action(step: Callable[..., torch.Tensor] = step, seen: list[float] = seen) -> None:
            seen.append(float(step(batches[len(seen) % len(batches)])))

        actions[name] = action
    seconds = interleave(actions, options.rounds, options.steps)
    return {"seconds": seconds, "losses": losses}


def report(figures: dict, options: argparse.Namespace) -> None:
    seconds, losses = figures["seconds"], figures["losses"]
    print(
        f"{'trainer':<12}{'ms/step':>9}{'/ whole':>9}{'/ torch TP':>12}{'quartiles':>16}{'gap':>10}"
    )
    for name, times in seconds.items():
        line = f"{name:<12}{1000 * statistics.median(times):>9.1f}"
        line += f"{ratio(times, seconds['whole'])[0]:>9.3f}" if "whole" in seconds else f"{'':>9}"
        if "torch TP" in seconds:
            median, low, high = ratio(times, seconds["torch TP"])
            line += f"{median:>12.3f}{f'{low:.3f}-{high:.3f}':>16}"
        if "whole" in losses:
            pairs = zip(losses[name], losses["whole"], strict=True)
            line += f"{max(abs(a - b) / b for a, b in pairs):>10.1e}"
        print(line)


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank(work, options)
        return
    arguments = ["--worker", "--trainers", *options.trainers]
    for name in ("hidden", "layers", "batch", "tokens", "rounds", "steps"):
        arguments += [f"--{name}", str(getattr(options, name))]
    figures = launch(__file__, arguments, options.ranks)
    report(figures, options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})


if __name__ == "__main__":
    main()
