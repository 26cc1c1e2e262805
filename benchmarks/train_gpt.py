"""Training a 17M-parameter GPT on two ranks: Penstock beside DDP, FSDP2 and DeepSpeed.

    python benchmarks/train_gpt.py [--json FILE]

All trainers live in the same two processes, start from the same weights, see the same bytes and
take turns; ratios are taken round by round. "torch" is one process with all cores and the whole
batch. "compute" is only the forward and backward of a rank's share, "no wire" with clipping and
AdamW of its share of the weights: the limits. Peak memory is measured afterwards, every trainer in
processes of its own.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys

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
from peers import DEEPSPEED, PENSTOCK, Settings, make_trainer, why_missing

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

SIZES = GPTConfig(layers=6, width=480, heads=6, context=128)
TRAINERS = (
    *("compute", "no wire", "torch", "DDP", "DDP-shm", "DDP-bf16", "FSDP2", "FSDP2-shm"),
    *(*DEEPSPEED, *PENSTOCK),
)
PEERS = {
    "ddp": ("DDP", "DDP-bf16"),
    "zero1": ("DDP", "DDP-bf16", "DeepSpeed-1"),
    "zero2": ("no wire", "DDP", "DDP-bf16", "DeepSpeed-2"),
    "zero3": ("no wire", "FSDP2", "FSDP2-shm", "DeepSpeed-3"),
    "DDP-shm": ("DDP",),  # what torch's own trainers gain from Penstock's back end
    "FSDP2-shm": ("FSDP2",),
}
MEMORY_STEPS = 3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=2, help=f"windows of {SIZES.context} bytes per rank")
    add("--precision", default="bf16", choices=("fp32", "bf16"))
    add("--clip", type=float, default=1.0, help="0 = off")
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=3, help="timed steps per trainer and round")
    add("--trainers", nargs="+", default=TRAINERS, choices=TRAINERS)
    add("--json", help="file for all figures")
    add("--worker", choices=("time", "memory"), help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- in the ranks


class Data:
    """Random text with structure: each byte depends on the one before. The same everywhere."""

    def __init__(self, num_windows: int):
        random = torch.Generator().manual_seed(0)
        text = torch.randint(4, (1 << 16,), generator=random).cumsum(0) * 7 % SIZES.vocab
        length = SIZES.context + 1
        starts = torch.randint(len(text) - length, (64, num_windows, 1), generator=random)
        self._windows = text[starts + torch.arange(length)]

    def batch(self, step: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._windows[step % len(self._windows), part]
        return window[:, :-1], window[:, 1:]


class Run:
    """One trainer, the data it has yet to see and the losses it had."""

    def __init__(self, name: str, options: argparse.Namespace):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        settings = Settings(
            precision=options.precision,
            clip=options.clip,
            micro_batch=options.batch,
            block_class=Block,
        )
        self._data = Data(options.batch * world)
        self._alone = name == "torch"
        self._part = slice(None) if self._alone else slice(rank, None, world)
        self._trainer = None
        if not self._alone or rank == 0:
            self._trainer = make_trainer(name, GPT(SIZES), settings)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One training step; "torch" takes all cores while the other ranks wait."""
        if self._trainer is None:
            self.losses.append(torch.zeros(()))
            return
        threads = torch.get_num_threads()
        if self._alone:
            torch.set_num_threads(threads * dist.get_world_size())
        batch = self._data.batch(len(self.losses), self._part)
        self.losses.append(self._trainer.step(*batch).float())
        torch.set_num_threads(threads)

    def mean_losses(self) -> list[float]:
        """The losses of the whole batch."""
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        return (losses / (1 if self._alone else dist.get_world_size())).tolist()

    def exchanges(self) -> int | None:
        """With other ranks in a step, where the trainer counts them."""
        count = getattr(self._trainer, "exchanges", None)
        return count() if count else None

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()


def time_worker(options: argparse.Namespace) -> dict:
    runs = {name: Run(name, options) for name in options.trainers}
    actions = {name: run.step for name, run in runs.items()}
    seconds = interleave(actions, options.rounds, options.steps)
    losses = {name: run.mean_losses() for name, run in runs.items()}
    exchanges = {name: run.exchanges() for name, run in runs.items()}
    for run in runs.values():
        run.close()
    return {"seconds": seconds, "losses": losses, "exchanges": exchanges}


def memory_worker(options: argparse.Namespace) -> dict:
    """Peak resident memory over the memory before there was a model, of the fullest rank."""
    warm_up()
    before = resident_bytes()
    run = Run(options.trainers[0], options)
    run.step()
    reset_peak()
    for _ in range(MEMORY_STEPS):
        run.step()
    peak = torch.tensor(peak_bytes() - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    run.close()
    return {"peak_bytes": int(peak)}


def warm_up() -> None:
    """Loads what torch loads on first use, so that it is not counted as the model's."""
    layer = torch.nn.Linear(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(8, 64)).float().sum().backward()
    dist.all_reduce(layer.weight.grad)


# ---- in the one that starts them


def loss_gap(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference of the losses, from step 1 on."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def report(figures: dict, options: argparse.Namespace) -> None:
    seconds, losses = figures["seconds"], figures["losses"]
    tokens = options.batch * options.ranks * SIZES.context
    for peer in DEEPSPEED:
        if why_missing(peer):
            print(f"{peer}: {why_missing(peer)}")
    print(
        f"\n{'trainer':<12}{'ms/step':>9}{'tokens/s':>10}{'/ compute':>11}{'/ DDP':>8}"
        f"{'peak MiB':>10}{'exchanges':>11}{'last loss':>11}{'gap':>9}"
    )
    for name, times in seconds.items():
        median = statistics.median(times)
        over_limit = ratio(times, seconds["compute"])[0] if "compute" in seconds else float("nan")
        over_ddp = ratio(times, seconds["DDP"])[0] if "DDP" in seconds else float("nan")
        gap = loss_gap(losses[name], losses["torch"]) if "torch" in losses else float("nan")
        exchanges = figures["exchanges"][name]
        learned = "" if name in ("compute", "no wire") else f"{losses[name][-1]:>11.4f}{gap:>9.1e}"
        print(
            f"{name:<12}{1000 * median:>9.1f}{tokens / median:>10.0f}{over_limit:>11.3f}"
            f"{over_ddp:>8.3f}{figures['peak_bytes'][name] / 2**20:>10.0f}"
            f"{'' if exchanges is None else exchanges:>11}{learned}"
        )
    print(f"\n{'ours / peer':<24}{'time':>7}{'quartiles':>16}{'peak memory':>14}")
    for ours, peers in PEERS.items():
        for peer in peers:
            if ours not in seconds or peer not in seconds:
                continue
            median, low, high = ratio(seconds[ours], seconds[peer])
            memory = figures["peak_bytes"][ours] / figures["peak_bytes"][peer]
            span = f"{low:.3f}-{high:.3f}"
            print(f"{ours + ' / ' + peer:<24}{median:>7.3f}{span:>16}{memory:>14.3f}")


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank({"time": time_worker, "memory": memory_worker}[options.worker], options)
        return
    names = [name for name in options.trainers if not why_missing(name)]
    start = functools.partial(launch, __file__, nproc=options.ranks)
    shared = ["--batch", str(options.batch), "--precision", options.precision]
    shared += ["--clip", str(options.clip), "--rounds", str(options.rounds)]
    shared += ["--steps", str(options.steps)]
    figures = start([*shared, "--worker", "time", "--trainers", *names])
    figures["peak_bytes"] = {}
    for name in names:
        try:
            memory = start([*shared, "--worker", "memory", "--trainers", name])
        except RuntimeError as error:  # a peer that does not get through is no figure
            print(f"{name}: no memory figure\n{error}", file=sys.stderr)
            memory = {"peak_bytes": float("nan")}
        figures["peak_bytes"][name] = memory["peak_bytes"]
    report(figures, options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})


if __name__ == "__main__":
    main()
