"""What the benchmarks gpu_*.py train: sizes of GPTs, their data, a trainer's run in a process, and
which trainers share a process."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import accelerator
import gpu_trainers
import torch
import torch.distributed as dist
from accelerator import Deadline

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

GIB = 2.0**30
BATCHES = 8
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.92, 0.9, 0.85  # of what is free
Places = tuple[float, float, float]  # bytes of device, host and disk


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its step."""

    model: GPTConfig
    batch: int  # sequences; with several ranks, of each
    recompute: bool
    steps: int  # timed in a row

    @property
    def tokens(self) -> int:
        return self.batch * self.model.context


SIZES = {
    "tiny": Size(GPTConfig(2, 64, 2, 64, 256), 4, False, 2),
    "125m": Size(GPTConfig(12, 768, 12, 1024, 32768), 16, False, 10),
    "1.5b": Size(GPTConfig(48, 1600, 25, 2048, 32768), 8, True, 3),
    "7b": Size(GPTConfig(32, 4096, 32, 2048, 32768), 8, True, 2),
}


@functools.cache
def count(config: GPTConfig) -> tuple[int, int]:
    """Parameters, and of these the ones that a token is multiplied with."""
    with torch.device("meta"):
        model = GPT(config)
    total = sum(param.numel() for param in model.parameters())
    return total, total - model.token.weight.numel() - model.position.weight.numel()


def flops(size: Size) -> float:
    """Of a step, by the model's definition; nothing is counted twice for being recomputed."""
    config = size.model
    attention = 6.0 * config.layers * config.width * config.context
    return size.tokens * (6.0 * count(config)[1] + attention)


@functools.cache
def unit_params(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in Block(config).parameters())


def pinned_rounding(config: GPTConfig) -> float:
    """Pinned memory of a block's bf16 values divided by their bytes: torch's allocator rounds up to
    the next power of two."""
    unit_bytes = 2 * unit_params(config)
    return (1 << (unit_bytes - 1).bit_length()) / unit_bytes


# ---- in a process of some trainers


class Run:
    """One trainer, the data it has yet to see and the losses it had. Each rank has its own data."""

    def __init__(self, name: str, size: Size, settings: gpu_trainers.Settings):
        def build() -> GPT:
            torch.manual_seed(0)
            with torch.device(settings.device):
                return GPT(size.model)

        config = size.model
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = torch.Generator().manual_seed(rank)
        shape = (BATCHES, size.batch, config.context + 1)
        # Each token depends on the one before, so there is something to learn.
        tokens = torch.randint(4, shape, generator=random).cumsum(-1) * 7 % config.vocab
        self._tokens = tokens.to(settings.device)
        self._trainer = gpu_trainers.make(name, build, settings)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        batch = self._tokens[len(self._losses) % BATCHES]
        self._losses.append(self._trainer.step(batch[:, :-1], batch[:, 1:]).float())

    def finish(self) -> None:
        self._trainer.finish()

    def losses(self) -> list[float]:
        """By step; with several ranks the mean of theirs, and all of them call it."""
        own = torch.stack(self._losses).tolist()
        world = dist.get_world_size() if dist.is_initialized() else 1
        return [loss / world for loss in accelerator.over_ranks(own, dist.ReduceOp.SUM)]


def started(name: str, size: Size, settings: gpu_trainers.Settings) -> tuple[Run, dict[str, Any]]:
    """A trainer after two steps, and the memory it took for them beyond what there was: on the
    device at most, on the host in the end."""
    device = settings.device
    accelerator.synchronize(device)
    before, host = accelerator.allocated_bytes(device), accelerator.available_bytes()
    run = Run(name, size, settings)
    accelerator.reset_peak(device)
    for _ in range(2):
        run.step()
    run.finish()
    accelerator.synchronize(device)
    peak = accelerator.peak_bytes(device) - before
    return run, {"device_bytes": peak, "host_bytes": host - accelerator.available_bytes()}


class Rounds:
    """As many as fit, up to `most`, by what the longest so far took."""

    def __init__(self, deadline: Deadline, most: int):
        self._deadline, self._most, self._left_s = deadline, most, deadline.left_s()
        self._longest_s, self._count = 0.0, -1

    def may_go_on(self) -> bool:
        """Asked before each, and so after each."""
        left = self._deadline.left_s()
        self._count += 1
        if self._count > 0:
            self._longest_s = max(self._longest_s, self._left_s - left)
        self._left_s = left
        return self._count < self._most and left > 1.2 * self._longest_s


def gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference over the steps that both took."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False))


# ---- in the one that starts them


def room(device: torch.device, path: str) -> Places:
    """Bytes that may be taken; `path` is the folder of swap files."""
    return (
        DEVICE_SHARE * accelerator.free_bytes(device),
        HOST_SHARE * accelerator.available_bytes(),
        DISK_SHARE * shutil.disk_usage(path).free,
    )


def activation_bytes(size: Size) -> float:
    """Of one trainer at a time: saved inputs of blocks, what one block (without recomputation: all)
    saves inside, and the scores."""
    config = size.model
    of_block = 40.0 * size.tokens * config.width
    blocks = 1 if size.recompute else config.layers
    kept = 4.0 * size.tokens * config.width * config.layers
    return blocks * of_block + kept + 14.0 * size.tokens * config.vocab


def needed(name: str, size: Size, world: int = 1) -> Places:
    """Bytes of a rank where a trainer's state rests."""
    params, each = count(size.model)[0], gpu_trainers.BYTES[name]
    pinned = each.pinned * pinned_rounding(size.model)
    parts = (each.device + each.shard / world, each.host + pinned, each.disk)
    return tuple(params * part for part in parts)  # type: ignore[return-value]


def passing(size: Size) -> Places:
    """Bytes of the trainer whose turn it is, or beside its model while it is made."""
    working = gpu_trainers.WORKING_BYTES * count(size.model)[0]
    return (activation_bytes(size) + working, 0.0, 0.0)


def _fits(names: Sequence[str], size: Size, world: int, places: Places) -> bool:
    """Whether these can share a process. What is on disk takes its own time, so it has its own."""
    if len(names) > 1 and any(gpu_trainers.BYTES[name].disk for name in names):
        return False
    used = (needed(name, size, world) for name in names)
    sums = [sum(column) for column in zip(*used, strict=True)]
    return all(u + b <= p for u, b, p in zip(sums, passing(size), places, strict=True))


def why_not(name: str, size: Size, world: int, places: Places) -> str:
    """The place that lacks room for this trainer alone; empty if none does."""
    columns = ("device", "host", "disk"), needed(name, size, world), passing(size), places
    for place, wanted, beside, there in zip(*columns, strict=True):
        if wanted + beside > there:
            return f"{(wanted + beside) / GIB:.0f} GiB of {place} needed, {there / GIB:.0f} there"
    return ""


def processes(
    names: Sequence[str], size: Size, places: Places, world: int = 1
) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the trainers of each process, as many as fit, and why the others are left out."""
    found: list[list[str]] = []
    skipped: dict[str, str] = {}
    for name in names:
        if why := why_not(name, size, world, places):
            skipped[name] = why
            continue
        for group in found:
            if _fits([*group, name], size, world, places):
                group.append(name)
                break
        else:
            found.append([name])
    return found, skipped


def settings_of(device: torch.device, size: Size, path: str = "") -> gpu_trainers.Settings:
    """`path`: the folder of swap files."""
    return gpu_trainers.Settings(device, Block, size.recompute, path=path)
