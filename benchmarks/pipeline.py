"""A step of a GPT in stages: Penstock's pipeline beside torch's own and DeepSpeed's.

    python benchmarks/pipeline.py [--pipeline 2] [--data 2] [--json FILE]

All trainers live in the same processes, start from the same weights, see the same tokens and take
turns; ratios are taken round by round. "torch DDP" and "torch FSDP2" are Schedule1F1B of
torch.distributed.pipelining over stages that these wrap; "DeepSpeed-1" is its PipelineModule with
ZeRO-1, where that package can be imported. All are cut alike, and have torch's fused AdamW or
Penstock's. The loss gap is that to plain torch in one process, over all steps.

Memory is measured apart, in processes of one trainer each: what their resident peak has above what
they had before the model was built, the largest and the sum of all ranks. The bubble is measured in
one more run, of Penstock alone without data ranks, each process on a core of its own where there
are as many: the time that ranks are not computing, over the time that they are, from the first
forward of a step to the last backward, beside the simulator's for stages as slow as those were.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import alone, interleave, launch, machine, ratio, run_rank, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from penstock._native import _penstock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from pipeline_report import Clock, Done, gather

LR, VOCAB = 1e-3, 1024
TORCH = ("torch DDP", "torch FSDP2")
DEEPSPEED = "DeepSpeed-1"
WINDOW = {"param": {"hold": "RR@device:fp32"}}  # gathered once a step
PENSTOCK: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3 window": {"strategy": "zero3", "table": WINDOW},
}
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
    add("--trainers", nargs="+", default=trainers(), choices=trainers())
    add("--json", help="file for all figures")
    add("--worker", choices=("speed", "memory", "bubble"), help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def trainers() -> list[str]:
    peers = [*TORCH, DEEPSPEED] if importlib.util.find_spec("deepspeed") else [*TORCH]
    return [*peers, *PENSTOCK]


# ---- the model


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


def stages_of(options: argparse.Namespace) -> list[nn.Sequential]:
    """Equal numbers of blocks; the embedding is in the first stage, the head in the last."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(options.hidden) for _ in range(options.layers)]
    layers = [nn.Embedding(VOCAB, options.hidden), *blocks, nn.Linear(options.hidden, VOCAB)]
    each = options.layers // options.pipeline
    inner = [1 + each * stage for stage in range(1, options.pipeline)]
    bounds = zip([0, *inner], [*inner, len(layers)], strict=True)
    return [nn.Sequential(*layers[first:last]) for first, last in bounds]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Whole(nn.Module):
    def __init__(self, stages: list[nn.Sequential]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return loss_of(x, labels)


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), LR, weight_decay=0.01, fused=True)


# ---- trainers; each takes the samples of a data rank for a step


def by_torch(name: str, options: argparse.Namespace) -> Step:
    mesh = init_device_mesh(
        "cpu", (options.pipeline, options.data), mesh_dim_names=("pipeline", "data")
    )
    number = mesh["pipeline"].get_local_rank()
    module: nn.Module = stages_of(options)[number]
    if name == "torch FSDP2":
        for layer in module.children():
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(module, mesh=mesh["data"])
    optimizer = adamw(module)
    if name == "torch DDP" and options.data > 1:
        group = mesh["data"].get_group()
        module = nn.parallel.DistributedDataParallel(module, process_group=group)
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(module, number, options.pipeline, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss_of)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if number == 0 else ()
        if number == options.pipeline - 1:
            schedule.step(*inputs, target=labels, losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def penstock_engine(name: str, options: argparse.Namespace) -> penstock.Engine:
    settings = {
        **PENSTOCK[name],
        "mesh": {"pipeline": options.pipeline},
        "parallel": {"stages": [f"stages.{stage}" for stage in range(1, options.pipeline)]},
        "batch": {"accumulate": options.micro_batches},
        "optimizer": {"type": "AdamW", "lr": LR, "weight_decay": 0.01},
        "units": {"modules": ["Block", "Embedding"], "layer_bytes": 1},
    }
    return penstock.initialize(Whole(stages_of(options)), settings)


def by_penstock(name: str, options: argparse.Namespace) -> Step:
    engine = penstock_engine(name, options)
    return lambda tokens, labels: float(engine.train_batch((tokens, labels)))


def by_deepspeed(options: argparse.Namespace) -> Step:
    import deepspeed  # noqa: PLC0415 - optional, and slow to import
    from deepspeed.pipe import PipelineModule  # noqa: PLC0415

    deepspeed.init_distributed("gloo")
    module = PipelineModule(
        stages_of(options),
        num_stages=options.pipeline,
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.micro_batches,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=config)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        parts = zip(tokens.split(options.batch), labels.split(options.batch), strict=True)
        return float(engine.train_batch(parts))

    return step


def by_one_process(options: argparse.Namespace) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Of all samples."""
    module = Whole(stages_of(options))
    optimizer = adamw(module)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        loss = module(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def make(name: str, options: argparse.Namespace) -> Step:
    if name in TORCH:
        return by_torch(name, options)
    return by_deepspeed(options) if name == DEEPSPEED else by_penstock(name, options)


# ---- what ranks do


class Samples:
    """The same for every trainer: `of(step)` gives tokens and labels of this data rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        rows = options.batch * options.micro_batches
        shape = (16, options.data, rows, options.tokens + 1)
        self._all = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
        self._mine = dist.get_rank() % options.data

    def of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self._all[step % len(self._all), self._mine]
        return mine[:, :-1], mine[:, 1:]

    def all_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        every = self._all[step % len(self._all)].flatten(0, 1)
        return every[:, :-1], every[:, 1:]


def mean_of_last(losses: list[float], options: argparse.Namespace) -> list[float]:
    """Of the data ranks of the last stage, which alone have torch's losses."""
    last = dist.get_rank() >= options.data * (options.pipeline - 1)
    mine = torch.tensor(losses, dtype=torch.float64) * (1.0 if last else 0.0)
    dist.all_reduce(mine)
    return (mine / options.data).tolist()


def speed(options: argparse.Namespace) -> dict[str, Any]:
    samples = Samples(options)
    steps = {name: make(name, options) for name in options.trainers}
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def action(name: str) -> None:
        losses[name].append(steps[name](*samples.of(len(losses[name]))))

    seconds = interleave(
        {name: lambda name=name: action(name) for name in steps}, options.rounds, options.steps
    )
    for name in losses:
        losses[name] = mean_of_last(losses[name], options)
    one = by_one_process(options) if dist.get_rank() == 0 else None
    count = len(losses[options.trainers[0]])
    plain = [one(*samples.all_of(i)) for i in range(count)] if one else []
    return {"seconds": seconds, "losses": losses, "plain": plain}


def memory(options: argparse.Namespace) -> list[int]:
    """Bytes by rank, of the only trainer."""
    (name,) = options.trainers
    samples = Samples(options)
    if name == DEEPSPEED:
        import deepspeed.pipe  # noqa: F401, PLC0415 - so that what it imports is not counted
    return alone(lambda: make(name, options), lambda step: step(*samples.of(0)))


def bubble(options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own_cores = dist.get_world_size() <= len(cores)
    if own_cores:
        os.sched_setaffinity(0, {cores[dist.get_rank()]})
    engine = penstock_engine("ddp", options)
    clock = Clock(engine)
    samples = Samples(options)
    for i in range(options.rounds * options.steps + 2):
        engine.train_batch(samples.of(i))
    by_rank: list[list[list[Done]]] = gather(list(clock.windows)[2:])
    measured, simulated, stages = [], [], []
    for rows in zip(*by_rank, strict=True):
        every = [one for row in rows for one in row]
        busy = sum(one.end - one.begin - one.waited for one in every)
        whole = max(one.end for one in every) - min(one.begin for one in every)
        stages.append(
            [tuple(seconds_of(row, forward) for forward in (True, False)) for row in rows]
        )
        measured.append(len(rows) * whole / busy - 1)
        simulated.append(
            _penstock.simulated_bubble("1f1b", len(rows), options.micro_batches, stages[-1])
        )
    return {"own cores": own_cores, "measured": measured, "simulated": simulated, "stages": stages}


def seconds_of(row: list[Done], forward: bool) -> float:
    """Of a micro-batch, the mean."""
    own = [one.end - one.begin - one.waited for one in row if one.forward == forward]
    return sum(own) / len(own)


# ---- what they give


def print_speed(figures: dict[str, Any], peaks: dict[str, list[int]]) -> None:
    seconds, plain = figures["seconds"], figures["plain"]
    peers = [name for name in seconds if name not in PENSTOCK]
    head = f"{'trainer':<14}{'ms/step':>9}" + "".join(f"{'/ ' + name:>27}" for name in peers)
    print(head + f"{'loss gap':>10}{'peak MiB':>10}{'all ranks':>11}")
    for name, times in seconds.items():
        line = f"{name:<14}{1000 * statistics.median(times):>9.1f}"
        for peer in peers:
            median, low, high = ratio(times, seconds[peer])
            line += f"{f'{median:.3f} ({low:.3f}-{high:.3f})':>27}"
        pairs = zip(figures["losses"][name], plain, strict=True)
        line += f"{max(abs(a - b) / b for a, b in pairs):>10.1e}"
        print(line + f"{max(peaks[name]) / 2**20:>10.0f}{sum(peaks[name]) / 2**20:>11.0f}")


def print_bubble(figures: dict[str, Any], options: argparse.Namespace) -> None:
    measured, simulated = (statistics.median(figures[key]) for key in ("measured", "simulated"))
    ratios = [a / b for a, b in zip(figures["measured"], figures["simulated"], strict=True)]
    rows = zip(*figures["stages"], strict=True)
    times = ", ".join(
        "{:.1f} + {:.1f}".format(
            *(1000 * statistics.median(one[direction] for one in row) for direction in (0, 1))
        )
        for row in rows
    )
    print(
        f"bubble of {options.pipeline} stages and {options.micro_batches} micro-batches, idle / "
        f"busy: measured {100 * measured:.1f} %, simulated {100 * simulated:.1f} %, step by step "
        f"{statistics.median(ratios):.3f} of it; (P - 1) / m is "
        f"{100 * (options.pipeline - 1) / options.micro_batches:.1f} %; "
        f"ms of a stage's forward + backward: {times}"
    )
    if not figures["own cores"]:
        print("processes share cores: what is measured has waits for a core in it")


def main() -> None:
    options = parse_options()
    if options.layers % options.pipeline:
        raise SystemExit(f"--layers {options.layers} do not divide by --pipeline")
    if options.worker:
        run_rank({"speed": speed, "memory": memory, "bubble": bubble}[options.worker], options)
        return

    def run(worker: str, names: list[str], ranks: int) -> Any:
        arguments = ["--worker", worker, "--trainers", *names]
        for name, value in vars(options).items():
            if name not in ("json", "worker", "result", "trainers", "data"):
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        arguments += ["--data", str(ranks // options.pipeline)]
        print(f"{worker}: {', '.join(names)}", file=sys.stderr, flush=True)
        return launch(__file__, arguments, ranks)

    world = options.pipeline * options.data
    figures = run("speed", options.trainers, world)
    figures["peaks"] = {name: run("memory", [name], world) for name in options.trainers}
    print_speed(figures, figures["peaks"])
    figures["bubble"] = run("bubble", ["ddp"], options.pipeline)
    print_bubble(figures["bubble"], options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})


if __name__ == "__main__":
    main()
