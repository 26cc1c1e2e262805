"""Moves the inputs of recomputed layers to the host between forward and backward."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_open: list[CheckpointHiddenStatesOffload] = []  # the innermost last
_plain_call: Any = None  # GradientCheckpointingLayer.__call__, while a context is open


@dataclasses.dataclass
class CheckpointActivationOffloadStats:
    """Counts since the context was last entered."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0


@dataclasses.dataclass
class _Saved:
    """A tensor that autograd saved, on its device or on the host."""

    device: torch.device
    tensor: torch.Tensor
    on_host: bool = False
    stats: Any = None


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """A context in which the inputs of recomputed layers are held on the host until the backward.

    It marks the first argument of each transformers GradientCheckpointingLayer that recomputes.
    Other layers mark theirs with mark(). Tensors that are not marked stay where they are, and so do
    tensors of fewer bytes than `min_offload_bytes`, tensors whose elements share memory, and the
    last `keep_last_count` marked tensors, which the backward needs first.

    Copies run on the current stream. The arguments about streams and pools are accepted, and have
    no effect. The native key offload.activations overlaps the copies with computation.

    Raises:
        ValueError: if `keep_last_count` is negative.
        RuntimeError: if a context is entered a second time before its end.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        if keep_last_count < 0:
            raise ValueError(f"keep_last_count must be at least 0, not {keep_last_count}")
        self._pins, self._least, self._keep = use_pin_memory, min_offload_bytes, keep_last_count
        self.reset()
        super().__init__(self._pack, self._unpack)

    def mark(self, tensor: torch.Tensor) -> None:
        """Marks a tensor. When autograd saves it the next time, it is moved to the host."""
        self._marked[id(tensor)] += 1
        self.stats.marked_tensors += 1

    def reset(self) -> None:
        """Forgets all marks and counts. Tensors that were moved can still be used in a backward."""
        self.stats = CheckpointActivationOffloadStats()
        self._marked: collections.Counter[int] = collections.Counter()
        self._last: collections.deque[_Saved] = collections.deque()

    def __enter__(self) -> Any:
        if self in _open:
            raise RuntimeError(
                "[deepspeed::CheckpointHiddenStatesOffload] this context is already open, and it "
                "is not re-entrant. Make another one for a nested context"
            )
        self.reset()
        _open.append(self)
        _watch_layers()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _open.remove(self)
        if not _open:
            _leave_layers()
        self._marked.clear()
        self._last.clear()
        return super().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        self.stats.saved_tensors_seen += 1
        if self._marked[id(tensor)] == 0:
            return tensor
        self._marked[id(tensor)] -= 1
        shares = any(step == 0 and size > 1 for step, size in _steps(tensor))
        if tensor.device.type == "cpu" or tensor.nbytes < self._least or shares:
            self.stats.skipped_marked_tensors += 1
            return tensor
        saved = _Saved(tensor.device, tensor.detach(), stats=self.stats)
        self._last.append(saved)
        self.stats.kept_last_tensors = min(len(self._last), self._keep)
        while len(self._last) > self._keep:
            self._move(self._last.popleft())
        return saved

    def _move(self, saved: _Saved) -> None:
        values = saved.tensor
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        host.copy_(values, non_blocking=self._pins)
        saved.tensor, saved.on_host = host, True
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += values.nbytes

    def _unpack(self, kept: torch.Tensor | _Saved) -> torch.Tensor:
        if not isinstance(kept, _Saved):
            return kept
        if kept.on_host:
            kept.tensor = kept.tensor.to(kept.device, non_blocking=True)
            kept.on_host = False
            kept.stats.restored_tensors += 1
        return kept.tensor


def get_checkpoint_hidden_states_offloading_ctx_manager(
    **options: Any,
) -> CheckpointHiddenStatesOffload:
    return CheckpointHiddenStatesOffload(**options)


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.stride(), tensor.shape, strict=True))


def _watch_layers() -> None:
    global _plain_call
    transformers = sys.modules.get("transformers")
    layer = getattr(transformers, "GradientCheckpointingLayer", None)
    if layer is None or _plain_call is not None:
        return
    _plain_call = layer.__call__

    @functools.wraps(_plain_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        if getattr(self, "gradient_checkpointing", False) and self.training and _open:
            if torch.is_tensor(given):
                _open[-1].mark(given)
        return _plain_call(self, *args, **kwargs)

    layer.__call__ = call


def _leave_layers() -> None:
    global _plain_call
    if _plain_call is not None:
        sys.modules["transformers"].GradientCheckpointingLayer.__call__ = _plain_call
        _plain_call = None
