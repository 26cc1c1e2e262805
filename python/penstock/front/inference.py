"""Inference inside training, and weights for other programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front.forward_guard import Forwards
from penstock.front.row_slices import RowSlices

MODES = ("auto", "resident", "stream")


class Inference:
    """The engine's methods for inference. All ranks call them together."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _structure: Any
    _pipeline: Any
    _forwards: Forwards
    gathered: Any

    @contextlib.contextmanager
    def inference(self, mode: str = "auto", block_tokens: int | None = None) -> Iterator[None]:
        """Prepares forwards and `generate()` without gradients, for example for rollouts.

        In the context, the model is in eval mode and torch.no_grad() is set. Training continues
        afterwards as if nothing had happened, also in the middle of an accumulation window, but
        random numbers that were drawn are gone. In mode "resident", parameters are gathered once,
        and ranks may then run different numbers of forwards and of `generate()`. Tensor, sequence,
        pipeline and expert ranks still compute together.

        If parameters were gathered for the context, an error in it ends it on all ranks: they raise
        a RuntimeFault with its text when they leave, and the engine can go on. Ranks that compute
        together do not wait for a rank that failed.

        Args:
            mode: "resident": each rank keeps the whole parameters (of its part of the model) in the
                memory in which it computes. "stream": each forward moves them as in training.
                "auto": "resident", if that takes at most 4/5 of the memory that is left on every
                rank.
            block_tokens: tokens that a block (an element of a ModuleList) computes at a time, in
                whole rows of the batch: at least one row. So activations inside blocks are in
                memory for these rows alone, and parameters are gathered once for all rows. Default:
                all rows at once.

        Raises:
            ConfigError: if the mode is unknown; if `block_tokens` is less than 1, or the model has
                no blocks, or "offload.cache" moves their tokens.
            RuntimeFault: if the mode is "resident" and a rank has too little memory; if sharded
                parameters that were gathered for the context were changed in it; if the code of
                another rank raised an error in it; from a forward, if a block cannot run on slices
                of the batch.
        """
        if mode not in MODES:
            raise ConfigError(f'[front::inference] mode is "{mode}"; allowed: {", ".join(MODES)}')
        slices = self._slices(block_tokens)
        values = self._core.values
        units = values.units_of([])
        held = mode != "stream" and values.hold(units)
        if mode == "resident" and not held:
            raise RuntimeFault(
                "[front::inference] a rank has too little memory to keep all parameters whole. "
                'Use mode "stream" or "auto"'
            )
        before = modes_of(self.module)
        try:
            self.module.eval()
            alone = self._forwards.resident() if held else contextlib.nullcontext()
            with torch.no_grad(), alone, slices:
                yield
        except BaseException as error:
            if held:
                self._leave_held(units, error)
            raise
        finally:
            set_modes(before)
        if held:
            values.let_go_of_held(units, "")

    def _slices(self, block_tokens: int | None) -> contextlib.AbstractContextManager[Any]:
        if block_tokens is None:
            return contextlib.nullcontext()
        if not _is_count(block_tokens):
            raise ConfigError(
                f"[front::inference] block_tokens is {block_tokens!r}; allowed: a whole number >= 1"
            )
        if self._core.token_caches.moves:
            raise ConfigError(
                '[front::inference] block_tokens and "offload.cache" do not work together: a cache '
                "that moves has the tokens of all rows. Leave one of them out"
            )
        if any(unit.is_tile for unit in self._core.units) or self.config.mesh.expert > 1:
            raise ConfigError(
                '[front::inference] block_tokens does not work with "tiling" or "mesh.expert" yet'
            )
        return RowSlices(self.module, self._core.units, block_tokens, self._computes_together())

    def _computes_together(self) -> bool:
        """Whether this rank exchanges values with others while a block computes, or relays them."""
        mesh = self.config.mesh
        return int(mesh.tensor * mesh.pipeline * mesh.sequence * mesh.expert) > 1

    def _leave_held(self, units: list[int], error: BaseException) -> None:
        """Ends the context on a rank whose code raised an error.

        If the other ranks are sure to leave their contexts, tells them the error there.
        """
        values, told = self._core.values, f"{type(error).__name__}: {error}"
        if self._computes_together() or not isinstance(error, Exception):
            values.abandon_held(units, told)
            return
        with contextlib.suppress(RuntimeFault):  # the caller raises `error`
            values.let_go_of_held(units, f"inference() was left with {told}")

    def weights(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = 256 << 20
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the full value of each parameter and persistent buffer.

        For a server that takes weights while it runs: `load_weights(engine.weights())`. All ranks
        must iterate to the end, or stop at the same name. The call gathers some units at a time, in
        the dtype in which they compute, and yields copies. `engine.steps` can serve as the number
        of the version. Until the iterator ends, calls that change the weights raise a RuntimeFault.
        A parameter with several names has the first one only, as in
        `torch.nn.Module.named_parameters()`.

        Args:
            dtype: dtype of the parameters; default: the dtype in which they compute.
            bucket_bytes: units are gathered together up to this size. One unit can be larger.

        Raises:
            ConfigError: if `bucket_bytes` is less than 1, or `dtype` is not a floating dtype.
        """
        if not _is_count(bucket_bytes):
            raise ConfigError(
                f"[front::weights] bucket_bytes is {bucket_bytes!r}. Pass a number of bytes >= 1"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"[front::weights] dtype is {dtype!r}. Pass a floating dtype, such as "
                f"torch.bfloat16"
            )
        return self._weights(dtype, bucket_bytes)

    def _weights(
        self, dtype: torch.dtype | None, bucket_bytes: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        values = self._core.values
        values.begin_pass()
        try:
            for bucket in self._buckets(bucket_bytes):
                with self.gathered([param for _, param in bucket]):
                    for name, param in bucket:
                        yield name, param.detach().to(dtype or param.dtype, copy=True)
            self._pipeline.bring_buffers()
            for name, buffer in _persistent_buffers(self.module):
                yield name, buffer.detach().clone()
        finally:
            values.end_pass()

    def _buckets(self, bucket_bytes: int) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """Returns parameters with their names, in the order of units, divided by size."""
        values, shapes = self._core.values, dict(self._core.values.shapes())
        unit_of = values.first_units()
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def modes_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, bool]]:
    """Returns each module with its training flag."""
    return [(one, one.training) for one in model.modules()]


def set_modes(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for one, training in modes:
        one.training = training


class EvalMode:
    """Puts a model into eval mode until remove() is called."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = modes_of(model)
        model.eval()

    def remove(self) -> None:
        """Gives all modules the modes that they had before."""
        set_modes(self._before)


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer
