"""Which parameters a model has, compared with those that its engine was given."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList

from penstock._native import RuntimeFault
from penstock.front import module_tree


class _Changes:
    """Counts parameters and modules registered anywhere, so that models need not be walked."""

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
    """The parameters of one model by name, as at `initialize()` and as now.

    Attributes:
        names: every name of every parameter now: tied ones have several.
        own: each parameter's name in the engine.
        set_to_itself: called with the name of one that a parametrization was put on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        _Changes.watch()
        self.set_to_itself: Callable[[str], None] = lambda _name: None
        self._model, self._seen = model, _Changes.count
        self.names = module_tree.names_of(model)
        self.own = {param: names[0] for param, names in self.names.items()}
        self._places = self._where()
        self._late: dict[torch.Tensor, str] = {}  # came after initialize() and did not train
        _Changes.models.add(self)

    def _where(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (module._parameters, name, param)
            for module in self._model.modules()
            for name, param in module._parameters.items()
        ]

    def forget(self) -> None:
        """The engine is closed."""
        _Changes.models.discard(self)

    def look(self) -> bool:
        """Whether a parameter is in one more place than before: weights were tied.

        Raises RuntimeFault for a parameter that trains and that the engine does not have.
        """
        same = all(params.get(name) is param for params, name, param in self._places)
        registered = self._seen != _Changes.count
        registered |= any(param.requires_grad for param in self._late)
        if same and not registered:
            return False
        names = module_tree.names_of(self._model)
        # Without a registration it may be for one call: torch.func.functional_call().
        others = {param: its[0] for param, its in names.items() if param not in self.own}
        for param, name in others.items():
            if param.is_meta:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" is on meta now, without values: the '
                    f"engine keeps what it was initialized with. close() it before"
                )
            if registered and param.requires_grad:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{name}" came after initialize(): the engine '
                    f"neither averages its gradient nor trains it. Put it in before, or close() "
                    f"the engine and initialize again; new values for a parameter that is there "
                    f"are copied into it"
                )
        self._seen = _Changes.count
        self._late = others if registered else self._late
        if others:
            return False
        tied = any(len(names[p]) > len(self.names.get(p, ())) for p in names)
        self.names, self._places = names, self._where()
        return tied
