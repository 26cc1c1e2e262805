"""Access to an engine's fp32 masters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock._native import ConfigError


class ParamState:
    """The methods of an engine that read and write this state; all ranks call them together."""

    config: Any
    _core: Any
    _structure: Any
    _external: Any

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Returns averaged full fp32 gradients by name on all ranks, between backward and step."""
        return dict(self._core.values.full("grad"))

    def set_grads(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Replaces gradients, after the window's last backward and before step.

        Args:
            grads: full averaged gradients by name, as `full_grads()` gives them (any subset); the
                same values on every rank.

        Raises:
            RuntimeFault: inside an accumulation window.
            ConfigError: if a name is not a trained parameter, or the shape is not its shape.
        """
        for name, value in grads.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f'[front::set_grads] "{name}" is a {type(value).__name__}, not a tensor: leave '
                    f"a name out to keep its gradient"
                )
        self._core.values.set_gradients(list(grads.items()))

    def name_of(self, param: torch.Tensor) -> str:
        """Returns the parameter's name in the model. Raises ConfigError for any other tensor."""
        name = self._structure.own.get(param)
        if name is None:
            raise ConfigError("[front::name_of] the tensor is no parameter of the engine's model")
        return str(name)

    def state_names(self) -> list[str]:
        """The names, as in torch, of the state that the engine's optimizer keeps beside masters."""
        return [] if self._external is not None else list(self.config.optimizer.moments)

    def param_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a copy of the state, fp32 in the parameter's shape.

        Args:
            param: a parameter of the model.
            name: "param" for the master, or a moment ("exp_avg").

        Raises:
            ConfigError: if the engine keeps no state of that name for the parameter.
            RuntimeFault: inside `gathered()`.
        """
        kept: torch.Tensor = self._core.values.state(self.name_of(param), name)
        return kept

    def set_param_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Replaces the state by values equal on every rank. A new master also sets the weight."""
        self._core.values.set_state(self.name_of(param), name, values)

    def param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the averaged fp32 gradient between backward and step; None if there is none."""
        found: torch.Tensor | None = self._core.values.gradient(self.name_of(param))
        return found

    def local_state(self, param: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
        """Returns this rank's elements: their first index in the flat parameter, and a copy."""
        begin, values = self._core.values.local_state(self.name_of(param), name)
        return int(begin), values

    def set_local_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Replaces this rank's elements, as many as `local_state()` gives."""
        self._core.values.set_local_state(self.name_of(param), name, values)
