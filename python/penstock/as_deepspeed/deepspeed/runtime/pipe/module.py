"""PipelineModule: a list of layers that is divided among the stages of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from penstock import ConfigError
from penstock.front.engine import engine_of
from penstock.parallel import pipeline_layers
from penstock.parallel.pipeline_layers import LayerSpec as LayerSpec
from penstock.parallel.pipeline_layers import TiedLayerSpec as TiedLayerSpec
from penstock.parallel.pipeline_layers import type_name

from ...comm.comm import get_world_size, init_distributed
from ..activation_checkpointing import checkpointing
from ..utils import set_random_seed
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology

_Loss = Callable[[Any, Any], torch.Tensor]
_KNOWN = (
    checkpointing.checkpoint,
    checkpointing.non_reentrant_checkpoint,
    torch.utils.checkpoint.checkpoint,
)


class PipelineError(ConfigError):  # type: ignore[misc]
    """A call that a pipeline does not support."""


class PipelineModule(pipeline_layers.PipelineLayers):
    """A list of layers for `initialize()`, which returns a PipelineEngine. All ranks create it.

    The whole model is built on every rank and is an ordinary module until `initialize()`. The
    output of a layer, a tensor or a tuple, is the only argument of the next layer.

    Args:
        layers: modules, LayerSpec, TiedLayerSpec, functions of one argument.
        num_stages: the number of stages. Each stage has (ranks / num_stages) data ranks.
        topology: instead of num_stages: axes "pipe", "data" and "model" (tensor ranks), in this
            order. Over the axis "model" layers cut their own parameters (docs/deepspeed.md).
        loss_fn: loss_fn(outputs, labels) -> []; default: the last layer returns the loss.
        seed_layers: seed before each layer is built and before it runs.
        seed_fn: seed_fn(seed) seeds; default: seeds Python, NumPy and torch.
        base_seed: the first seed.
        partition_method: "parameters", "uniform" or "type:REGEX".
        activation_checkpoint_interval: if above 0, each layer with parameters is recomputed in
            backward.
        activation_checkpoint_func: must be DeepSpeed's or torch's function; the engine recomputes
            without it.
        checkpointable_layers: names of the classes of layers that are recomputed; default: all
            layers with parameters.
        dynamic_shape: accepted, without effect: shapes may always change.

    Raises:
        ConfigError: an argument is wrong or not supported.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: _Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            init_distributed()
        topology = _topology(topology, num_stages)
        self.seed_layers, self.base_seed = seed_layers, base_seed
        self.seed_fn = seed_fn or set_random_seed
        self.micro_offset = 0
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._check_checkpointing()
        super().__init__(layers, topology.get_dim("pipe"), partition_method)
        self._loss: tuple[_Loss | None] = (_checked_loss(loss_fn),)  # hidden from nn.Module
        self.dynamic_shape = dynamic_shape
        self._grid = PipelineParallelGrid(topology)

    @property
    def loss_fn(self) -> _Loss | None:
        return self._loss[0]

    @loss_fn.setter
    def loss_fn(self, given: _Loss | None) -> None:
        self._loss = (_checked_loss(given),)

    @property
    def tied_modules(self) -> nn.ModuleDict:
        """The modules of TiedLayerSpec by key."""
        return nn.ModuleDict(self._tied)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets activation_checkpoint_interval. Raises ConfigError after initialize()."""
        if any(engine_of(one) is not None for one in self.parameters()):
            raise ConfigError(
                "[deepspeed::set_checkpoint_interval] the model has an engine, which keeps the "
                "interval that it was created with: call it before initialize()"
            )
        self.activation_checkpoint_interval = interval
        self._check_checkpointing()

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Returns losses by name that are only reported, or None. Subclasses override it."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each layer."""
        for index, layer in enumerate(self.forward_funcs):
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)
            else:
                self.forward_funcs[index] = torch.compile(layer, *args, **kwargs)

    def topology(self) -> ProcessTopology:
        return self.mpu().topology()

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place among stages and data ranks."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def pipeline_settings(self) -> dict[str, Any]:
        self._check_checkpointing()
        made = super().pipeline_settings()
        made["mesh"]["tensor"] = self._grid.model_parallel_size
        if self.activation_checkpoint_interval > 0 and self.checkpointable_layers is None:
            made["activations"] = {"checkpoint": "unit"}
        return made

    def recomputed_layers(self) -> list[tuple[str, nn.Module]]:
        """Returns the layers whose classes are checkpointable_layers, by name."""
        if self.activation_checkpoint_interval == 0:
            return []
        layers = enumerate(self.forward_funcs)
        named = self.checkpointable_layers or ()
        return [
            (str(index), one)
            for index, one in layers
            if isinstance(one, nn.Module) and type_name(one) in named
        ]

    def forward(self, forward_input: Any) -> Any:
        """Runs all layers in order. In an engine, a rank computes only its stage's layers."""
        self.micro_offset += 1
        return super().forward(forward_input)

    def _check_checkpointing(self) -> None:
        """Raises ConfigError for recomputation settings that only DeepSpeed supports."""
        interval, function = self.activation_checkpoint_interval, self.activation_checkpoint_func
        if interval < 0:
            raise ConfigError(
                f"[deepspeed::PipelineModule] activation_checkpoint_interval is {interval}; "
                f"allowed: 0 or more"
            )
        if interval > 0 and getattr(function, "func", function) not in _KNOWN:  # func: a partial
            raise ConfigError(
                "[deepspeed::PipelineModule] activation_checkpoint_func is a custom function, but "
                "the engine recomputes layers itself: leave it out, or call it in the layers"
            )
        names = self.checkpointable_layers
        if names is not None and not isinstance(names, list):
            raise ConfigError(
                f"[deepspeed::PipelineModule] checkpointable_layers is a {type(names).__name__}; "
                f"allowed: a list of class names, None"
            )

    def _built_layer(self, given: Any, index: int, builder: Any) -> Any:
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        return super()._built_layer(given, index, builder)

    def _before_layer(self, index: int) -> None:
        if self.seed_layers:
            self.seed_fn(self.base_seed * (self.micro_offset + 1) + index)


def _topology(given: ProcessTopology | None, num_stages: int | None) -> ProcessTopology:
    """Returns a topology with the axes "pipe", "data" and "model", the pipeline outermost.

    Raises ConfigError if the engine does not support the given topology.
    """
    world = get_world_size()
    if given is None and num_stages is None:
        raise ConfigError("[deepspeed::PipelineModule] give num_stages or topology")
    if given is None:
        assert num_stages is not None
        if not isinstance(num_stages, int) or num_stages < 1 or world % num_stages:
            raise ConfigError(
                f"[deepspeed::PipelineModule] num_stages is {num_stages!r}; allowed: a divisor of "
                f"the number of ranks, {world}"
            )
        return PipeDataParallelTopology(num_stages, world // num_stages)
    stages = given.get_dim("pipe")
    if stages == 0 or (num_stages is not None and num_stages != stages):
        raise ConfigError(
            f'[deepspeed::PipelineModule] num_stages is {num_stages}, but the axis "pipe" of the '
            f"topology has {stages} ranks"
        )
    order = [axis for axis in given.axes if given.get_dim(axis) > 1]
    if order != [axis for axis in ("pipe", "data", "model") if given.get_dim(axis) > 1]:
        raise ConfigError(
            f"[deepspeed::PipelineModule] the topology has axes {given.axes} with {given.dims} "
            f'ranks; allowed: "pipe", "data" and "model", in this order'
        )
    return given


def _checked_loss(given: Any) -> Any:
    if isinstance(given, nn.Module) and next(given.parameters(), None) is not None:
        raise ConfigError(
            f"[deepspeed::PipelineModule] loss_fn is a {type(given).__name__} with parameters, "
            f"which no stage would train: make it the last layer"
        )
    return given
