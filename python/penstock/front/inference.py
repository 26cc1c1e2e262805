"""Inference inside training, and weights for other programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault

MODES = ("auto", "resident", "stream")


class Inference:
    """The engine's methods for inference. All ranks call them together."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _structure: Any
    gathered: Any

    @contextlib.contextmanager
    def inference(self, mode: str = "auto") -> Iterator[None]:
        """Prepares forwards and `generate()` without gradients, for example for rollouts.

        In the context, the model is in eval mode and torch.no_grad() is set. Training continues
        afterwards as if nothing had happened, also in the middle of an accumulation window. In mode
        "resident", parameters are gathered once, and ranks may then run different numbers of
        forwards. Tensor, sequence and pipeline ranks still compute together.

        Args:
            mode: "resident": each rank keeps the whole parameters (of its part of the model) in the
                memory in which it computes. "stream": each forward moves them as in training.
                "auto": "resident", if that takes at most 4/5 of the memory that is left on every
                rank.

        Raises:
            ConfigError: if the mode is unknown.
            RuntimeFault: if the mode is "resident" and a rank has too little memory; if parameters
                were changed in the context.
        """
        if mode not in MODES:
            raise ConfigError(f'[front::inference] mode is "{mode}"; allowed: {", ".join(MODES)}')
        values = self._core.values
        units = values.units_of([])
        held = mode != "stream" and values.hold(units)
        if mode == "resident" and not held:
            raise RuntimeFault(
                "[front::inference] a rank has too little memory to keep all parameters whole. "
                'Use mode "stream" or "auto"'
            )
        training = [one for one in self.module.modules() if one.training]
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        except BaseException:
            if held:
                values.let_go(units)
            raise
        finally:
            for one in training:
                one.training = True
        if held:
            values.let_go_of_held(units)

    def weights(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = 256 << 20
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the full value of each parameter and persistent buffer.

        For a server that takes weights while it runs: `load_weights(engine.weights())`. All ranks
        must iterate to the end, or stop at the same name. The call gathers some units at a time, in
        the dtype in which they compute. A tensor that the caller keeps is copied when its units are
        freed. `engine.steps` can serve as the number of the version. A parameter with several names
        has the first one only, as in `torch.nn.Module.named_parameters()`.

        Args:
            dtype: dtype of the parameters; default: the dtype in which they compute.
            bucket_bytes: units are gathered together up to this size. One unit can be larger.

        Raises:
            ConfigError: if `bucket_bytes` is less than 1, or `dtype` is not a floating dtype.
        """
        if bucket_bytes < 1:
            raise ConfigError(
                f"[front::weights] bucket_bytes is {bucket_bytes}. Pass a number of bytes >= 1"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(
                f"[front::weights] dtype is {dtype}. Pass a floating dtype, such as torch.bfloat16"
            )
        return self._weights(dtype, bucket_bytes)

    def _weights(
        self, dtype: torch.dtype | None, bucket_bytes: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        values = self._core.values
        for bucket in self._buckets(bucket_bytes):
            with self.gathered([param for _, param in bucket]):
                values.keep_views(values.units_of([name for name, _ in bucket]))
                for name, param in bucket:
                    yield name, param.detach() if dtype is None else param.detach().to(dtype)
        for name, buffer in _persistent_buffers(self.module):
            yield name, buffer.detach()

    def _buckets(self, bucket_bytes: int) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """Returns parameters with their names, in the order of units, divided by size."""
        values, shapes = self._core.values, dict(self._core.values.shapes())
        unit_of = {name: values.units_of([name])[0] for name in self._structure.own.values()}
        params = sorted(self._structure.own.items(), key=lambda one: unit_of[one[1]])
        buckets: list[list[tuple[str, torch.nn.Parameter]]] = []
        size, last = 0, -1
        for param, name in params:
            shape = torch.Size(shapes.get(name, param.shape))
            bytes_of_param = shape.numel() * param.element_size()
            if not buckets or (unit_of[name] != last and size + bytes_of_param > bucket_bytes):
                buckets.append([])
                size = 0
            buckets[-1].append((name, param))
            size, last = size + bytes_of_param, unit_of[name]
        return buckets


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer
