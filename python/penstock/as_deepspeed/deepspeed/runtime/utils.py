"""Functions that scripts import from deepspeed.runtime.utils."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from penstock import ConfigError
from penstock.front.engine import engine_of

from ..accelerator.cpu_accelerator import CPU_Accelerator
from ..accelerator.real_accelerator import get_accelerator
from ..utils.bwc import bwc_tensor_model_parallel_world_size


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Moves tensors, also in lists, tuples and dicts, to a device.

    If `criterion_func` is given, only tensors for which it returns True are moved.
    """
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, list):
        return [move_to_device(one, device, criterion_func) for one in item]
    if isinstance(item, tuple):
        return tuple(move_to_device(one, device, criterion_func) for one in item)
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the memory of rank 0's accelerator and of its host, if `force` is set.

    MA is the memory that tensors occupy; CA is the memory that torch's allocator holds. On a CPU
    both are the resident memory of the process.
    """
    if not force or int(os.environ.get("RANK", "0")) != 0:
        return
    own, host = get_accelerator(), CPU_Accelerator()
    used, most = own.memory_allocated() / 2**30, own.max_memory_allocated() / 2**30
    had, peak = own.memory_reserved() / 2**30, own.max_memory_reserved() / 2**30
    print(f"{message}\nMA {used:.2f} GB Max_MA {most:.2f} GB CA {had:.2f} GB Max_CA {peak:.0f} GB")
    total, free = host.total_memory(), host.available_memory()
    used = (total - free) / 2**30
    print(f"CPU Virtual Memory:  used = {used:.2f} GB, percent = {100 * (1 - free / total):.1f}%")


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Returns the text of a call."""
    inner = [repr(one) for one in args] + [f"{key}={one!r}" for key, one in kwargs.items()]
    return f"{base}({', '.join(inner)})"


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: int = 2, mpu: Any = None
) -> Any:
    """Clips as torch does. Raises ConfigError for the parameters of an engine, and for an mpu with
    tensor ranks."""
    if bwc_tensor_model_parallel_world_size(mpu) > 1:
        raise ConfigError(
            "[deepspeed::clip_grad_norm_] an mpu with tensor ranks is not supported: pass it to "
            "deepspeed.initialize() and set gradient_clipping in the config"
        )
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(engine_of(one) is not None for one in chosen):
        raise ConfigError(
            "[deepspeed::clip_grad_norm_] the parameters belong to an engine, which shards their "
            "gradients: set gradient_clipping in the config instead"
        )
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Returns the bounds of equal parts. The remainder goes to the first parts, one item each."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Returns the sums of the first 1, 2, ... weights."""
    return list(itertools.accumulate(weights))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Returns bounds for which the largest and the smallest sum of a part's weights differ least.

    With as many weights as parts, or fewer, each part has at most one. If several partitions are
    equally good, returns the one with the smallest last parts.
    """
    if len(weights) <= num_parts:
        return [min(part, len(weights)) for part in range(num_parts + 1)]
    sums = [0.0, *itertools.accumulate(weights)]
    # For each number of items: cost, largest and smallest sum, and bounds of the parts so far.
    best: dict[int, tuple[float, float, float, list[int]]] = {0: (0.0, 0.0, math.inf, [0])}
    for part in range(1, num_parts + 1):
        longer = {}
        for end in range(part, len(weights) + 1):
            made = []
            for start in (one for one in best if one < end):
                _, most, least, bounds = best[start]
                own = sums[end] - sums[start]
                most, least = max(most, own), min(least, own)
                made.append((most - least, -start, most, least, [*bounds, end]))
            cost, _, most, least, bounds = min(made)
            longer[end] = (cost, most, least, bounds)
        best = longer
    return best[len(weights)][3]


class PartitionedTensor:
    """A tensor whose elements are divided among the ranks of a group.

    Args:
        tensor: the full values, which are equal on all ranks.
        group: the ranks, each of which gets a part (see partition_uniform()).
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group, self.orig_size = group, list(tensor.shape)
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_device = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = "cpu"
    ) -> PartitionedTensor:
        """Makes a PartitionedTensor from the results of to_meta() and data(). Its full() puts the
        tensor on `device`."""
        num_dims, *rest = meta.tolist()
        num_parts, rank, *partition = rest[num_dims:]
        made = cls(torch.empty(0), group)
        if (num_parts, rank) != (made.num_parts, made.rank):
            raise ConfigError(
                f"[deepspeed::PartitionedTensor] the part is number {rank} of {num_parts}, but "
                f"this rank is {made.rank} of {made.num_parts}"
            )
        made.orig_size, made.partition = rest[:num_dims], partition
        made.orig_device, made.local_data = torch.device(device), local_part.detach()
        return made

    def to_meta(self) -> torch.Tensor:
        """Returns an int64 tensor: number of dims, dims, number of parts, rank, bounds."""
        values = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(values, device=self.orig_device)

    def full(self, device: Any = None) -> torch.Tensor:
        """Returns the full tensor. All ranks of the group call it."""
        sizes = [end - start for start, end in itertools.pairwise(self.partition)]
        own = self.local_data.new_zeros(max(sizes))
        parts = [torch.zeros_like(own) for _ in sizes]
        own[: self.local_data.numel()] = self.local_data
        dist.all_gather(parts, own, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def data(self) -> torch.Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


def count_used_parameters_in_backward(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Returns how many parameters the running backward reaches. Call it in a hook."""
    if torch._C._current_graph_task_id() == -1:
        raise ConfigError("[deepspeed::count_used_parameters_in_backward] no backward is running")
    with torch.enable_grad():
        reached = {get_gradient_edge(one).node for one in parameters if one.requires_grad}
    return sum(torch._C._will_engine_execute_node(node) for node in reached)


class DummyOptim:
    """A placeholder for a missing optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def empty_cache() -> None:
    """Returns the memory that torch's allocator caches to the device."""
    get_accelerator().empty_cache()
