"""PipelineModule: a list of layers that is divided among the stages of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from penstock import ConfigError
from penstock.front import sharded_init
from penstock.front.engine import engine_of
from penstock.parallel import pipeline_layers
from penstock.parallel.pipeline_layers import LayerSpec as LayerSpec
from penstock.parallel.pipeline_layers import TiedLayerSpec as TiedLayerSpec
from penstock.parallel.pipeline_layers import type_name

from ...comm.comm import (
    _broadcast_values,
    _of_ranks,
    _raise_together,
    get_world_size,
    init_distributed,
)
from ..activation_checkpointing import checkpointing
from ..utils import set_random_seed
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology

_Loss = Callable[[Any, Any], torch.Tensor]
_KNOWN = (
    checkpointing.checkpoint,
    checkpointing.non_reentrant_checkpoint,
    torch.utils.checkpoint.checkpoint,
)

_MARKS = (bool, int, float, str)  # types of parameter attributes that all ranks copy


class PipelineError(ConfigError):  # type: ignore[misc]
    """A call that a pipeline does not support."""


class _AllLayers(pipeline_layers.PipelineLayers):
    """The layers of all stages, which the engine trains. `seed` is None without seed_layers."""

    def __init__(
        self, layers: Iterable[Any], stages: int, method: str, seed: Any, base_seed: int
    ) -> None:
        self.seed, self.base_seed, self.micro_offset = seed, base_seed, 0
        super().__init__(layers, stages, method)

    @property
    def tied(self) -> dict[str, nn.Module]:
        """The first module with each key."""
        return self._tied

    def forward(self, forward_input: Any) -> Any:
        self.micro_offset += 1
        return super().forward(forward_input)

    def _built_layer(self, given: Any, index: int, builder: Any) -> Any:
        if self.seed is not None:
            self.seed(self.base_seed + index)
        return super()._built_layer(given, index, builder)

    def _before_layer(self, index: int) -> None:
        if self.seed is not None:
            self.seed(self.base_seed * (self.micro_offset + 1) + index)


class PipelineModule(nn.Module):
    """A list of layers for `initialize()`, which returns a PipelineEngine. All ranks create it.

    Every rank builds the whole model, `whole`. The module itself has the layers of this rank's
    stage, under DeepSpeed's names: "INDEX", or "tied_modules.KEY" for a TiedLayerSpec. The output
    of a layer, a tensor or a tuple, is the only argument of the next layer.

    Args:
        layers: modules, LayerSpec, TiedLayerSpec, functions of one argument.
        num_stages: the number of stages. Each stage has (ranks / num_stages) data ranks.
        topology: instead of num_stages: axes "pipe", "data" and "model" (tensor ranks), in this
            order. Over the axis "model" layers cut their own parameters (docs/deepspeed.md).
        loss_fn: loss_fn(outputs, labels) -> []; default: the last layer returns the loss.
        seed_layers: whether to set the seed before each layer is built, and before it runs.
        seed_fn: called as seed_fn(seed); default: seeds Python, NumPy and torch.
        base_seed: the first seed.
        partition_method: "parameters", "uniform" or "type:REGEX".
        activation_checkpoint_interval: if above 0, each layer with parameters is recomputed in
            backward.
        activation_checkpoint_func: must be DeepSpeed's or torch's function, which the engine does
            not call.
        checkpointable_layers: names of the classes of layers that are recomputed; default: all
            layers with parameters.
        dynamic_shape: accepted, without effect: shapes may always change.

    Attributes:
        parts: the num_stages + 1 bounds of the stages, as layer indices.
        forward_funcs: the layers of this rank's stage.
        tied_modules: the modules of this stage's TiedLayerSpecs, by key.

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
        super().__init__()
        topology = _topology(topology, num_stages)
        self.seed_layers, self.base_seed = seed_layers, base_seed
        self.seed_fn = seed_fn or set_random_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._check_checkpointing()
        self.num_stages = topology.get_dim("pipe")
        seed = self.seed_fn if seed_layers else None
        made = _AllLayers(layers, self.num_stages, partition_method, seed, base_seed)
        # In a tuple, so that nn.Module does not register them.
        self._hidden: tuple[_AllLayers, _Loss | None] = (made, _checked_loss(loss_fn))
        self.dynamic_shape = dynamic_shape
        self._grid = PipelineParallelGrid(topology)
        self.parts = made.parts
        self._register()

    def _register(self) -> None:
        """Registers the layers of this rank's stage."""
        begin, end = self.parts[self._grid.stage_id : self._grid.stage_id + 2]
        self.forward_funcs = self.whole.forward_funcs[begin:end]
        self.tied_modules = nn.ModuleDict()
        keys = {id(next(one.parameters(), None)): key for key, one in self.whole.tied.items()}
        for index, layer in enumerate(self.forward_funcs, begin):
            module = layer.module if isinstance(layer, pipeline_layers.TiedLayer) else layer
            if not isinstance(module, nn.Module):
                continue
            first = next(module.parameters(), None)
            key = None if first is None else keys.get(id(first))
            if key is None:
                self.add_module(str(index), module)
            elif key not in self.tied_modules:
                self.tied_modules[key] = module

    @property
    def whole(self) -> _AllLayers:
        """The layers of all stages. An engine keeps only this stage's values on this rank."""
        return self._hidden[0]

    @property
    def loss_fn(self) -> _Loss | None:
        return self._hidden[1]

    @loss_fn.setter
    def loss_fn(self, given: _Loss | None) -> None:
        self._hidden = (self.whole, _checked_loss(given))

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage of a layer. Raises ConfigError if there is no such layer."""
        return self.whole.stage_owner(layer_idx)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets activation_checkpoint_interval. Raises ConfigError after initialize()."""
        if any(engine_of(one) is not None for one in self.parameters()):
            raise ConfigError(
                "[deepspeed::set_checkpoint_interval] the model has an engine, which keeps the "
                "interval that it was created with: call set_checkpoint_interval() before "
                "initialize()"
            )
        self.activation_checkpoint_interval = interval
        self._check_checkpointing()

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Returns losses by name that are only reported, or None. Subclasses may override this."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each layer."""
        for index, layer in enumerate(self.whole.forward_funcs):
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)
            else:
                self.whole.forward_funcs[index] = torch.compile(layer, *args, **kwargs)
        begin = self.parts[self._grid.stage_id]
        self.forward_funcs[:] = self.whole.forward_funcs[begin:][: len(self.forward_funcs)]

    def topology(self) -> ProcessTopology:
        return self.mpu().topology()

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place among stages and data ranks."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def pipeline_settings(self) -> dict[str, Any]:
        self._check_checkpointing()
        made = self.whole.pipeline_settings()
        made["mesh"]["tensor"] = self._grid.model_parallel_size
        if self.activation_checkpoint_interval > 0 and self.checkpointable_layers is None:
            made["activations"] = {"checkpoint": "unit"}
        return made

    def recomputed_layers(self) -> list[tuple[str, nn.Module]]:
        """Returns the layers whose classes are checkpointable_layers, by name."""
        if self.activation_checkpoint_interval == 0:
            return []
        layers = enumerate(self.whole.forward_funcs)
        named = self.checkpointable_layers or ()
        return [
            (str(index), one)
            for index, one in layers
            if isinstance(one, nn.Module) and type_name(one) in named
        ]

    def forward(self, forward_input: Any) -> Any:
        """Runs the layers of all stages in order. In an engine, call train_batch() instead."""
        return self.whole(forward_input)

    def train(self, mode: bool = True) -> PipelineModule:
        self.whole.train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        own = {id(one) for one in self.modules()}
        for layer in self.whole.children():  # also the layers of other stages
            if id(layer) not in own:
                layer._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def take_from_owners(self) -> None:
        """Copies each layer's values, dtypes and attributes from the ranks of its stage.

        All ranks call it. Raises ConfigError, on all ranks, if stages have different tensors.
        """
        whole = {id(one) for one in self.whole.parameters()}
        outside = [name for name, one in self.named_parameters() if id(one) not in whole]
        named = dict([*self.whole.named_parameters(), *self.whole.named_buffers()])
        begin, end = self.parts[self._grid.stage_id : self._grid.stage_id + 2]
        own = self.whole.forward_funcs[begin:end]
        edited = list(map(id, self.forward_funcs)) != list(map(id, own))
        about = {name: _about(one) for name, one in named.items()}
        told = _of_ranks((outside, about), self._grid.pp_proc_group)
        names = {name for one in told for name in (*one[0], *one[1])}
        apart = [name for name in sorted(names) if not all(name in one[1] for one in told)]
        problem = ""
        if edited:
            problem = (
                "[deepspeed::initialize] PipelineModule.forward_funcs was edited, but the engine "
                "does not run this list: pass the new layers to PipelineModule() instead"
            )
        elif apart:
            problem = (
                f'[deepspeed::initialize] the PipelineModule has "{apart[0]}" on some ranks only, '
                f"or outside its layers: create it in the constructor of a layer"
            )
        _raise_together(problem)
        for name, one in named.items():
            stage = self.stage_owner(int(name.partition(".")[0]))
            owned = told[stage][1][name]
            if stage != self._grid.stage_id:
                _take(one, owned)
            if not owned["waits"]:
                source = self._grid.stage_to_global(stage)
                _broadcast_values(one, source, self._grid.pp_proc_group)

    def complete_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds other stages' parameters to the groups with the same index. All ranks call it."""
        names = {param: name for name, param in self.whole.named_parameters()}
        groups = optimizer.param_groups
        own = {names.get(one): at for at, group in enumerate(groups) for one in group["params"]}
        told = _of_ranks((len(groups), own), self._grid.pp_proc_group)
        counts = [count for count, _ in told]
        _raise_together(
            ""
            if len(set(counts)) == 1
            else f"[deepspeed::initialize] the optimizer has {counts} groups on the stages; these "
            f"numbers must be equal: create the same groups on each stage, empty ones if needed"
        )
        for param, name in names.items():
            owned = told[self.stage_owner(int(name.split(".")[0]))][1]
            if name not in own and name in owned:
                groups[owned[name]]["params"].append(param)

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


def _about(one: torch.Tensor) -> dict[str, Any]:
    marks = {key: value for key, value in vars(one).items() if isinstance(value, _MARKS)}
    held = sharded_init.waiting()  # values that penstock.init() or zero.Init keeps
    waits = one.is_meta or (held is not None and held.holds(one))
    return {
        "trains": one.requires_grad,
        "marks": marks,
        "waits": waits,
        "shape": tuple(one.shape),
        "dtype": one.dtype,
    }


def _take(one: torch.Tensor, about: dict[str, Any]) -> None:
    """Gives a tensor the shape, dtype and attributes in `about`, but no values."""
    if not about["waits"] and (tuple(one.shape), one.dtype) != (about["shape"], about["dtype"]):
        one.data = torch.empty(about["shape"], dtype=about["dtype"], device=one.device)
    one.requires_grad_(about["trains"])
    vars(one).update(about["marks"])


def _topology(given: ProcessTopology | None, num_stages: int | None) -> ProcessTopology:
    """Returns a topology with the axes "pipe", "data" and "model", the pipeline outermost.

    Raises ConfigError if the engine does not support the given topology.
    """
    world = get_world_size()
    if given is None and num_stages is None:
        raise ConfigError(
            "[deepspeed::PipelineModule] neither num_stages nor topology is given: pass one of them"
        )
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
