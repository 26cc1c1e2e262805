"""Which parameters a model has, compared with those that its engine was given."""

from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from penstock import tree
from penstock._native import RuntimeFault


class _Changes:
    """Counts parameters and modules registered anywhere, so that models need not be walked."""

    count = 0
    watching = False

    @classmethod
    def watch(cls) -> None:
        if cls.watching:
            return
        cls.watching = True
        register_module_parameter_registration_hook(cls._registered)
        register_module_module_registration_hook(cls._registered)

    @classmethod
    def _registered(cls, *_: Any) -> None:
        cls.count += 1


class Structure:
    """The parameters of one model by name, as at `initialize()` and as now.

    Attributes:
        names: every name of every parameter now: tied ones have several.
        own: each parameter's name in the engine.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        _Changes.watch()
        self._model, self._seen = model, _Changes.count
        self.names = tree.names_of(model)
        self.own = {param: names[0] for param, names in self.names.items()}
        self._places = self._where()

    def _where(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (module._parameters, name, param)
            for module in self._model.modules()
            for name, param in module._parameters.items()
        ]

    def look(self) -> bool:
        """Whether a parameter is in one more place than before: weights were tied.

        Raises RuntimeFault for a parameter that trains and that the engine does not have.
        """
        same = all(params.get(name) is param for params, name, param in self._places)
        if same and self._seen == _Changes.count:
            return False
        names = tree.names_of(self._model)
        for param, its_names in names.items():
            if param.requires_grad and param not in self.own:
                raise RuntimeFault(
                    f'[front::parameters] parameter "{its_names[0]}" came after initialize(): the '
                    f"engine neither averages its gradient nor trains it. Put it in before, or "
                    f"close() the engine and initialize again; new values for a parameter that is "
                    f"there are copied into it"
                )
        self._seen = _Changes.count
        tied = any(len(names[p]) > len(self.names.get(p, ())) for p in names)
        self.names, self._places = names, self._where()
        return tied
