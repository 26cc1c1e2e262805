"""Checks of a model's parameters: at initialize(), and later against those of initialize()."""

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
    """Counts registrations of parameters and modules in the process. An unchanged count makes a
    walk over the model unnecessary."""

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


class Structure:
    """The parameters of one model by name, at `initialize()` and now.

    Attributes:
        names: every name that a parameter has now; a tied parameter has several.
        own: each parameter's name in the engine.
        set_to_itself: called with the parameter's name when a parametrization is registered on it.
    """

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
            for module in self._model.modules()
            for name, param in module._parameters.items()
        ]

    def forget(self) -> None:
        """Stops watching the model, when the engine closes."""
        _Changes.models.discard(self)

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
        # Without a registration torch.func.functional_call() may have put it there for one call.
        others = {param: its[0] for param, its in names.items() if param not in self.own}
        for param, name in others.items():
            if param.is_meta:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" is on meta now, without values, but '
                    f"the engine still trains the parameter of initialize(). Call close() before"
                )
            if registered and param.requires_grad:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" came after initialize(), so the '
                    f"engine neither averages its gradient nor trains it. Add it before, or "
                    f"close() the engine and initialize again. To change the values of a "
                    f"parameter, copy new values into it"
                )
        self._seen = _Changes.count
        self._late = others if registered else self._late
        if others:
            return False
        tied = any(len(names[p]) > len(self.names.get(p, ())) for p in names)
        self.names, self._places = names, self._where()
        return tied


def check_params(model: torch.nn.Module) -> None:
    """Raises ConfigError if the model has no parameters or one that cannot be trained."""
    if next(model.parameters(), None) is None:
        raise ConfigError("[front::initialize] the model has no parameters to train")
    for name, param in model.named_parameters():
        if torch.nn.parameter.is_lazy(param):
            raise ConfigError(
                f'[front::initialize] parameter "{name}" has no shape yet. Call the model once '
                f"before, so that its lazy modules get their shapes"
            )
        if param.is_inference():
            raise ConfigError(
                f'[front::initialize] parameter "{name}" was made in inference mode, so it cannot '
                f"be trained. Clone it outside inference mode"
            )
