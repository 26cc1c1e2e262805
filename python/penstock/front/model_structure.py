"""Checks a model's parameters at initialize(), and later whether they are still the same."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree


class _Changes:
    """Counts registrations of parameters and modules in the process. If the count has not changed,
    no walk over the model is necessary."""

    count = 0
    watching = False
    models: "weakref.WeakSet[Structure]" = weakref.WeakSet()

    @classmethod
    def watch(cls) -> None:
        if cls.watching:
            return
        cls.watching = True
        register_module_parameter_registration_hook(cls._registered)
        register_module_module_registration_hook(cls._registered)

    @classmethod
    def _registered(cls, module: torch.nn.Module, _name: str, value: Any) -> None:
        cls.count += 1
        if isinstance(module, ParametrizationList) and isinstance(value, torch.nn.Parameter):
            for model in cls.models:
                if value in model.own:
                    model.set_to_itself(model.own[value])


_COLLECTED = (
    "the model's engine was garbage collected without close(), so nothing can apply gradients, and "
    "the engine still has the parameters. Keep the engine that initialize() returns, and call its "
    "close() before you use the model without it"
)


class Structure:
    """The parameters of one model by name, at `initialize()` and now.

    Attributes:
        names: every name that a parameter has now; a tied parameter has several.
        own: each parameter's name in the engine.
        set_to_itself: called with the parameter's name when a parametrization is registered on it.
        engine: returns the engine that trains the model, or None if it was garbage collected;
            before `initialize()` is complete and after `close()` the attribute is None.
    """

    engine: "weakref.ref[Any] | None" = None

    def __init__(self, model: torch.nn.Module) -> None:
        _Changes.watch()
        self.set_to_itself: Callable[[str], None] = lambda _name: None
        self._model, self._seen = model, _Changes.count
        self.names = module_tree.names_of(model)
        self.own = {param: names[0] for param, names in self.names.items()}
        self._places = self._where()
        self._late: dict[torch.Tensor, str] = {}  # added after initialize(), without requires_grad
        _Changes.models.add(self)

    def _where(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (module._parameters, name, param)
            for _, module in module_tree.modules_of(self._model)
            for name, param in module._parameters.items()
        ]

    def forget(self) -> None:
        """Stops watching the model, when the engine closes."""
        self.engine = None
        _Changes.models.discard(self)

    def check_engine(self) -> None:
        """Raises RuntimeFault if a gradient would go to an engine that was garbage collected."""
        if self.engine is not None and self.engine() is None and torch.is_grad_enabled():
            raise RuntimeFault(f"[front::forward] {_COLLECTED}")

    def look(self) -> bool:
        """Returns whether weights were tied: a parameter has more names than before.

        Raises RuntimeFault for a trainable parameter that the engine does not have, and for a
        parameter on meta.
        """
        same = all(params.get(name) is param for params, name, param in self._places)
        registered = self._seen != _Changes.count
        registered |= any(param.requires_grad for param in self._late)
        if same and not registered:
            return False
        names = module_tree.names_of(self._model)
        # If nothing was registered, torch.func.functional_call() may have put a parameter into
        # the model for one call.
        others = {param: its[0] for param, its in names.items() if param not in self.own}
        for param, name in others.items():
            if param.is_meta:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" is on meta now, without values, but '
                    f"the engine still trains the parameter that the model had at initialize(). "
                    f"Call close() before you move the model to meta"
                )
            if registered and param.requires_grad:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" was added after initialize(), so the '
                    f"engine neither averages its gradient nor trains it. Add it before "
                    f"initialize(), or close() the engine and initialize again. To change "
                    f"the values of a parameter, copy new values into it"
                )
        self._seen = _Changes.count
        self._late = others if registered else self._late
        if others:
            return False
        tied = any(len(names[p]) > len(self.names.get(p, ())) for p in names)
        self.names, self._places = names, self._where()
        return tied


def refuse_model(model: torch.nn.Module) -> None:
    """Raises ConfigError for a scripted module, and for a parameter that another engine trains, or
    that a garbage-collected engine trained."""
    for name, module in module_tree.modules_of(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f'[front::initialize] module "{name}" is scripted (torch.jit.script), and Python '
                f"hooks do not run inside it. Train the module itself and script a copy afterwards"
            )
    owners = [one for one in _Changes.models if one.engine is not None]
    for name, param in module_tree.params_of(model):
        for owner in owners:
            if param not in owner.own:
                continue
            if owner.engine is not None and owner.engine() is None:
                raise ConfigError(f'[front::initialize] parameter "{name}": {_COLLECTED}')
            raise ConfigError(
                f'[front::initialize] parameter "{name}" is already in another engine. '
                f"Call close() of that engine first"
            )


def _is_a(one: Any, *names: str) -> bool:
    """Whether one of the object's classes is a torch class with one of these names."""
    kinds = type(one).__mro__
    return any(kind.__name__ in names and kind.__module__.startswith("torch.") for kind in kinds)


def _refuse_wrappers(model: torch.nn.Module) -> None:
    # By name, because an import of torch.distributed.fsdp takes long.
    for name, module in module_tree.modules_of(model):
        if _is_a(module, "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
            what = f'module "{name}"' if name else "the model"
            wraps = "module" in module._modules
            raise ConfigError(
                f"[front::initialize] {what} is a {type(module).__name__}, which averages or "
                f"shards gradients itself. Pass the model "
                f"{'that it wraps (its .module)' if wraps else 'without fully_shard()'}"
            )


def check_params(model: torch.nn.Module) -> None:
    """Raises ConfigError if the model has no parameters, or a parameter that cannot be trained."""
    if next(module_tree.params_of(model), None) is None:
        raise ConfigError("[front::initialize] the model has no parameters to train")
    _refuse_wrappers(model)
    for name, param in module_tree.params_of(model):
        if _is_a(param, "DTensor"):
            raise ConfigError(
                f'[front::initialize] parameter "{name}" is a DTensor, so fully_shard() or '
                f"parallelize_module() has cut it already. Pass the model as it was before: the "
                f"engine shards it"
            )
        if torch.nn.parameter.is_lazy(param):
            raise ConfigError(
                f'[front::initialize] parameter "{name}" has no shape yet. Call the model once '
                f"before initialize(), so that its lazy modules get their shapes"
            )
        if param.is_inference():
            raise ConfigError(
                f'[front::initialize] parameter "{name}" was made in inference mode, so it cannot '
                f"be trained. Clone it outside inference mode"
            )
