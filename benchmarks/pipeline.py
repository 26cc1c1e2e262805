"""A step of a GPT in stages: Penstock's pipeline beside torch's own and DeepSpeed's.

    python benchmarks/pipeline.py [--data 2] [--json FILE]

All trainers live in the same processes, start from the same weights, see the same tokens and take
turns; ratios are taken round by round. "torch" is torch.distributed.pipelining's Schedule1F1B with
the model cut in equal runs of layers, with DistributedDataParallel where there are data ranks;
"deepspeed" is its PipelineModule with ZeRO-1, where that package can be imported. The loss gap is
that to "torch". The bubble is what is left of a step when what each further micro-batch costs
(between the given number and twice as many) is taken off for all of them; the optimizer's step is
in it, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import interleave, launch, machine, ratio, run_rank, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock

LR, VOCAB = 1e-3, 1024
Step = Callable[[torch.Tensor, torch.Tensor], float]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pipeline", type=int, default=2, help="stages")
    add("--data", type=int, default=1, help="replicas")
    add("--micro-batches", type=int, default=8)
    add("--hidden", type=int, default=384)
    add("--layers", type=int, default=6)
    add("--batch", type=int, default=2, help="sequences of a micro-batch")
    add("--tokens", type=int, default=128, help="of a sequence")
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=3, help="timed steps per trainer and round")
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 6, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return made


def layers_of(options: argparse.Namespace) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(options.hidden) for _ in range(options.layers)]
    return [nn.Embedding(VOCAB, options.hidden), *blocks, nn.Linear(options.hidden, VOCAB)]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def bounds(options: argparse.Namespace) -> list[int]:
    """Equal numbers of blocks; the embedding is in the first stage, the head in the last."""
    each = options.layers // options.pipeline
    return [0, *(1 + each * stage for stage in range(1, options.pipeline)), options.layers + 2]


def by_torch(options: argparse.Namespace) -> Step:
    world = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (options.pipeline, world // options.pipeline), mesh_dim_names=("pipeline", "data")
    )
    stage = mesh["pipeline"].get_local_rank()
    first, last = bounds(options)[stage : stage + 2]
    module: nn.Module = nn.Sequential(*layers_of(options)[first:last])
    optimizer = torch.optim.AdamW(module.parameters(), LR, weight_decay=0.01, fused=True)
    replicas = options.data > 1
    if replicas:
        module = nn.parallel.DistributedDataParallel(module, process_group=mesh["data"].get_group())
    group = mesh["pipeline"].get_group()
    made = PipelineStage(module, stage, options.pipeline, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(made, options.micro_batches, loss_fn=loss_of)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(tokens)
        elif stage == options.pipeline - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


class Whole(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return loss_of(x, labels)


def by_penstock(options: argparse.Namespace, micro_batches: int) -> Step:
    settings = {
        "strategy": "ddp",
        "mesh": {"pipeline": options.pipeline},
        "parallel": {"stages": [f"layers.{first}" for first in bounds(options)[1:-1]]},
        "batch": {"accumulate": micro_batches},
        "optimizer": {"type": "AdamW", "lr": LR, "weight_decay": 0.01},
        "units": {"layer_bytes": 1},
    }
    engine = penstock.initialize(Whole(layers_of(options)), settings)
    return lambda tokens, labels: float(engine.train_batch((tokens, labels)))


def by_deepspeed(options: argparse.Namespace) -> Step:
    import deepspeed  # noqa: PLC0415 - optional, and slow to import
    from deepspeed.pipe import PipelineModule  # noqa: PLC0415

    module = PipelineModule(
        layers_of(options), num_stages=options.pipeline, loss_fn=loss_of, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        rows = options.batch
        parts = zip(tokens.split(rows), labels.split(rows), strict=True)
        return float(engine.train_batch(parts))

    return step


def work(options: argparse.Namespace) -> dict[str, object]:
    world, rank = dist.get_world_size(), dist.get_rank()
    data = rank % (world // options.pipeline)
    generator = torch.Generator().manual_seed(1 + data)
    rows = options.batch * options.micro_batches
    batches = torch.randint(VOCAB, (16, 2 * rows, options.tokens + 1), generator=generator)
    made: dict[str, Step] = {
        "torch": by_torch(options),
        "penstock": by_penstock(options, options.micro_batches),
        "penstock 2x": by_penstock(options, 2 * options.micro_batches),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        made["deepspeed"] = by_deepspeed(options)
    losses: dict[str, list[float]] = {name: [] for name in made}

    def action(name: str) -> None:
        seen = losses[name]
        whole = batches[len(seen) % len(batches)][: rows * (2 if name.endswith("2x") else 1)]
        seen.append(made[name](whole[:, :-1], whole[:, 1:]))

    seconds = interleave(
        {name: lambda name=name: action(name) for name in made}, options.rounds, options.steps
    )
    # torch's losses are in the last stage.
    of_last = torch.tensor(losses["torch"], dtype=torch.float64)
    dist.broadcast(of_last, world - world // options.pipeline)
    losses["torch"] = of_last.tolist()
    return {"seconds": seconds, "losses": losses}


def report(figures: dict, options: argparse.Namespace) -> None:
    seconds, losses = figures["seconds"], figures["losses"]
    print(f"{'trainer':<12}{'ms/step':>9}{'/ torch':>9}{'quartiles':>16}{'loss gap':>10}")
    for name, times in seconds.items():
        line = f"{name:<12}{1000 * statistics.median(times):>9.1f}"
        if not name.endswith("2x"):
            median, low, high = ratio(times, seconds["torch"])
            line += f"{median:>9.3f}{f'{low:.3f}-{high:.3f}':>16}"
            pairs = zip(losses[name], losses["torch"], strict=True)
            gap = max(abs(a - b) / b for a, b in pairs) if options.data == 1 else float("nan")
            line += f"{gap:>10.1e}"
        print(line)
    count, fewest = options.micro_batches, options.pipeline - 1
    bubbles = [
        1 - (both - once) / once
        for once, both in zip(seconds["penstock"], seconds["penstock 2x"], strict=True)
    ]
    print(
        f"bubble of {options.pipeline} stages, {count} micro-batches: measured "
        f"{100 * statistics.median(bubbles):.1f} %, (P - 1) / (m + P - 1) is "
        f"{100 * fewest / (count + fewest):.1f} %"
    )


def main() -> None:
    options = parse_options()
    if options.layers % options.pipeline:
        raise SystemExit(f"--layers {options.layers} do not divide by --pipeline")
    if options.worker:
        run_rank(work, options)
        return
    arguments = ["--worker"]
    for name, value in vars(options).items():
        if name not in ("json", "worker", "result"):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    figures = launch(__file__, arguments, options.pipeline * options.data)
    report(figures, options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})


if __name__ == "__main__":
    main()
