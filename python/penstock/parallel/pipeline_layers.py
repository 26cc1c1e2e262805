"""Models that are a list of layers, cut into pipeline stages.

A layer returns a tensor or a tuple of tensors, which is the only argument of the next layer. The
model is built in full on every rank. `pipeline_settings()` has the config for `mesh.pipeline`. A
rank runs only the layers of its stages, so a layer's control flow and the shapes that it returns
may depend on values. Only the first stage reads the inputs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from penstock._native import ConfigError

Layer = Callable[[Any], Any]


class LayerSpec:
    """Class and arguments of a module that the pipeline builds.

    Raises ConfigError if the class is not a subclass of nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"[front::LayerSpec] {typename!r} is not a subclass of nn.Module")
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [repr(one) for one in self.module_args]
        given += [f"{name}={one!r}" for name, one in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same key.

    Args:
        key: name of the group of layers that share parameters.
        typename: class of the layers, the same for all. The first layer's arguments are used.
        forward_fn: forward_fn(module, inputs) is called instead of module(inputs).
        tied_weight_attr: names of parameters that must exist. All other parameters are shared, too.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        if isinstance(tied_weight_attr, str):
            tied_weight_attr = [tied_weight_attr]
        self.tied_weight_attr = list(tied_weight_attr)


class TiedLayer(nn.Module):
    """A module whose forward is forward_fn(module, inputs)."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module, self._forward_fn = module, forward_fn

    def forward(self, inputs: Any) -> Any:
        return self._forward_fn(self.module, inputs)


def balanced(weights: Sequence[float], may_begin: Sequence[bool], num_parts: int) -> list[int]:
    """Cuts a list into pieces of about equal weight: the sum of the pieces' squared weights is
    minimal.

    Args:
        weights: the weight of each item.
        may_begin: for each item, whether a piece other than the first may begin with it.
        num_parts: number of pieces; each has at least one item.

    Returns:
        num_parts + 1 bounds, from 0 to len(weights); [] if too few items may begin a piece. If
        several results are equal, the one with longer earlier pieces is used.
    """
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    size = len(weights)
    least = [0.0] + [float("inf")] * size  # least sum for the items before each index
    begins: list[list[int]] = []
    for part in range(num_parts):
        now, begin = [float("inf")] * (size + 1), [0] * (size + 1)
        for end in range(part + 1, size + 1):
            for first in range(part, end):
                if part and not may_begin[first]:
                    continue
                total = least[first] + (before[end] - before[first]) ** 2
                if total < float("inf") and total <= now[end]:
                    now[end], begin[end] = total, first
        least = now
        begins.append(begin)
    if least[size] == float("inf"):
        return []
    bounds = [size]
    for begin in reversed(begins):
        bounds.insert(0, begin[bounds[0]])
    return bounds


def _weights(layers: Sequence[Layer], method: str) -> list[float]:
    """Returns the weight of each layer in the partition. Raises ConfigError for a bad method."""
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return [1.0] * len(layers)
    if kind.lower() == "parameters":
        return [float(sum(p.numel() for p in _params(one) if p.requires_grad)) for one in layers]
    if kind.lower() == "type" and pattern:
        found = [bool(re.search(pattern, type_name(one), re.IGNORECASE)) for one in layers]
        if not any(found):
            names = ", ".join(dict.fromkeys(type_name(one) for one in layers))
            raise ConfigError(
                f'[front::PipelineModule] partition_method "{method}" matches none of the layers: '
                f"{names}"
            )
        return [float(one) for one in found]
    raise ConfigError(
        f'[front::PipelineModule] partition_method is "{method}". Allowed: "parameters", '
        f'"uniform", "type:REGEX"'
    )


def type_name(layer: Layer) -> str:
    """Returns the name of a layer's class, or of a function."""
    if isinstance(layer, TiedLayer):
        layer = layer.module
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def _params(layer: Layer) -> list[nn.Parameter]:
    return list(layer.parameters()) if isinstance(layer, nn.Module) else []


class _Builder:
    """Builds layers from modules, specs and functions."""

    def __init__(self) -> None:
        self.tied: dict[str, nn.Module] = {}
        self._classes: dict[str, type] = {}
        self._seen: set[int] = set()

    def build(self, given: Any, index: int) -> Layer:
        if isinstance(given, TiedLayerSpec):
            return self._tied(given)
        if isinstance(given, LayerSpec):
            return given.build()
        if isinstance(given, nn.Module):
            if id(given) in self._seen and [*given.parameters(), *given.buffers()]:
                raise ConfigError(
                    f"[front::PipelineModule] layer {index}, a {type(given).__name__}, is in the "
                    f"list twice. Share its parameters with TiedLayerSpec"
                )
            self._seen.add(id(given))
            return given
        if not callable(given) or isinstance(given, type):
            raise ConfigError(
                f"[front::PipelineModule] layer {index} is {given!r:.80}. Allowed: a module, a "
                f"LayerSpec, a function"
            )
        layer: Layer = given
        return layer

    def _tied(self, spec: TiedLayerSpec) -> Layer:
        before = self.tied.get(spec.key)
        if before is None:
            module = spec.build()
            self.tied[spec.key], self._classes[spec.key] = module, spec.typename
            for one in module.modules():
                if getattr(one, "track_running_stats", False):
                    raise ConfigError(
                        f'[front::PipelineModule] tied layer "{spec.key}" has a '
                        f"{type(one).__name__}, whose running statistics change in each forward, "
                        f"but stages share only parameters. Use track_running_stats=False"
                    )
        elif self._classes[spec.key] is not spec.typename:
            raise ConfigError(
                f'[front::PipelineModule] tied layers "{spec.key}" have the classes '
                f"{self._classes[spec.key].__name__} and {spec.typename.__name__}. Use one class, "
                f"and forward_fn for a different call"
            )
        else:  # another module with the same parameters
            tensors = [*before.parameters(), *before.buffers()]
            module = copy.deepcopy(before, {id(one): one for one in tensors})
        for name in spec.tied_weight_attr:
            if not isinstance(_attribute(module, name), nn.Parameter):
                raise ConfigError(
                    f'[front::PipelineModule] tied layer "{spec.key}" has no parameter "{name}" '
                    f"(tied_weight_attr)"
                )
        return module if spec.forward_fn is None else TiedLayer(module, spec.forward_fn)


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


class PipelineLayers(nn.Module):
    """A sequence of layers, cut into stages. Modules are named by their index: "0", "1".

    Args:
        layers: modules, LayerSpec, TiedLayerSpec, functions of one argument.
        num_stages: number of stages.
        partition_method: the number that is balanced over stages: trainable "parameters", layers
            ("uniform"), or layers whose class or function name matches "type:REGEX" (case is
            ignored).

    Attributes:
        parts: num_stages + 1 bounds of the stages' layers.

    Raises:
        ConfigError: if an item is not a layer, if partition_method is unknown or matches no layer,
            or if fewer layers have parameters than there are stages.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int, partition_method: str = "parameters"
    ) -> None:
        super().__init__()
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
            raise ConfigError(
                f"[front::PipelineModule] num_stages is {num_stages!r}. Allowed: whole numbers >= 1"
            )
        self.num_stages = num_stages
        builder = _Builder()
        self.forward_funcs: list[Layer] = []
        for index, given in enumerate(layers):
            layer = self._built_layer(given, index, builder)
            self.forward_funcs.append(layer)
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
        self._tied = builder.tied  # the first module of each key
        self.parts = self._cut(partition_method)

    def _built_layer(self, given: Any, index: int, builder: _Builder) -> Layer:
        """Returns the layer of one item of the list. Subclasses may override it."""
        return builder.build(given, index)

    def _cut(self, method: str) -> list[int]:
        may_begin = [bool(_params(one)) for one in self.forward_funcs]
        if sum(may_begin) < self.num_stages:
            raise ConfigError(
                f"[front::PipelineModule] there are {self.num_stages} stages and {sum(may_begin)} "
                f"layers with parameters, but each stage needs at least one of these layers"
            )
        first = may_begin.index(True)  # layers before it belong to the same stage
        may_begin[first] = False
        weights = _weights(self.forward_funcs, method)
        return balanced(weights, may_begin, self.num_stages)

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage of a layer. Raises ConfigError if there is no such layer."""
        if not 0 <= layer_idx < len(self.forward_funcs):
            raise ConfigError(
                f"[front::PipelineModule] there is no layer {layer_idx}: the model has "
                f"{len(self.forward_funcs)} layers"
            )
        return sum(layer_idx >= begin for begin in self.parts[1:-1])

    def pipeline_settings(self) -> dict[str, Any]:
        """Returns the config for an engine: the stages, and layers with parameters as units."""
        kinds = {type(one).__name__ for one in self.forward_funcs if _params(one)}
        return {
            "mesh": {"pipeline": self.num_stages},
            "parallel": {"stages": [str(begin) for begin in self.parts[1:-1]]},
            "units": {"modules": sorted(kinds)},
        }

    def forward(self, inputs: Any) -> Any:
        first, inputs = self.pipeline_entry(inputs)
        for index in range(first, len(self.forward_funcs)):
            self._before_layer(index)
            inputs = self.forward_funcs[index](inputs)
        return inputs

    def pipeline_entry(self, inputs: Any) -> tuple[int, Any]:
        """Returns the first layer of a forward and its inputs. An engine replaces this method, so
        that a forward begins with the first layer of a stage."""
        return 0, inputs

    def _before_layer(self, index: int) -> None:
        """A hook for subclasses, called before each layer."""


def as_inputs(value: Any) -> torch.Tensor | tuple[Any, ...]:
    """Returns the argument of the first layer: a tensor, or a tuple. A list becomes a tuple.

    Raises ConfigError for any other type.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(value)
    raise ConfigError(
        f"[front::train_batch] inputs are a {type(value).__name__}. Allowed: a tensor, or a tuple "
        f"or list"
    )
