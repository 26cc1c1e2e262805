"""What an engine keeps for parameters: fp32 masters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock._native import ConfigError


class ParamState:
    """The part of an engine that shows it; every rank calls these together."""

    config: Any
    _core: Any
    _structure: Any
    _external: Any

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Averaged full fp32 gradients by name, after backward and before step, on all ranks."""
        return dict(self._core.values.full("grad"))

    def set_grads(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Replaces gradients, after the window's last backward and before step.

        Args:
            grads: full averaged gradients by name, as `full_grads()` gives them (any subset); the
                same values on every rank.

        Raises:
            RuntimeFault: in the middle of a window.
            ConfigError: a name that does not train, or a shape that is not its parameter's.
        """
        for name, value in grads.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f'[front::set_grads] "{name}" is a {type(value).__name__}, not a tensor: leave '
                    f"a name out to keep its gradient"
                )
        self._core.values.set_gradients(list(grads.items()))

    def name_of(self, param: torch.Tensor) -> str:
        """The parameter's name in the model. Raises ConfigError for a tensor that is none of it."""
        name = self._structure.own.get(param)
        if name is None:
            raise ConfigError("[front::name_of] the tensor is no parameter of the engine's model")
        return str(name)

    def state_names(self) -> list[str]:
        """What the engine's optimizer keeps beside the masters, by torch's names."""
        return [] if self._external is not None else list(self.config.optimizer.moments)

    def param_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of what is kept, fp32 in the parameter's shape.

        Args:
            param: of the model.
            name: "param" for the master, or a moment ("exp_avg").

        Raises:
            ConfigError: the engine keeps none of that name for it.
            RuntimeFault: inside `gathered()`.
        """
        kept: torch.Tensor = self._core.values.state(self.name_of(param), name)
        return kept

    def set_param_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Replaces it by values that are equal on every rank; the weight follows its master."""
        self._core.values.set_state(self.name_of(param), name, values)

    def param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """The averaged fp32 gradient, after backward and before step; None where none is kept."""
        found: torch.Tensor | None = self._core.values.gradient(self.name_of(param))
        return found

    def local_state(self, param: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
        """This rank's elements of it: the first one's index in the flat parameter, and a copy."""
        begin, values = self._core.values.local_state(self.name_of(param), name)
        return int(begin), values

    def set_local_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Replaces this rank's elements, as many as `local_state()` gives."""
        self._core.values.set_local_state(self.name_of(param), name, values)
