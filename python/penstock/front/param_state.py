"""Access to an engine's fp32 masters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock._native import ConfigError
from penstock.front.loaded_values import LoadedValues


class ParamState:
    """The engine's methods that read and write this state. All ranks call them together."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _structure: Any
    _external: Any
    gathered: Any

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads whole weights and buffers. All ranks call it; the weights of rank 0 count.

        The model's own `load_state_dict()` takes the values, so its overrides and hooks work as
        without an engine. A master takes the fp32 value, even if its parameter rounds it. With the
        model's method inside `gathered(write=True)`, the master would take the rounded value.

        Args:
            state_dict: as `Engine.state_dict()` returns it, in any floating dtypes.
            strict: as in `torch.nn.Module.load_state_dict()`.
            assign: as in `torch.nn.Module.load_state_dict()`.

        Returns:
            What the model's method returns: the missing and the unexpected keys.

        Raises:
            RuntimeError: from the model's method, for other keys or shapes.
        """
        how = {"assign": True} if assign else {}
        with self.gathered(write=True), LoadedValues(self._structure.own) as loaded:
            keys = self.module.load_state_dict(state_dict, strict=strict, **how)
        self._core.values.refine_masters(list(loaded.found.items()))
        return keys

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Returns averaged full fp32 gradients by name on all ranks, between backward and step.

        The dict lacks a parameter that got no gradient on any rank: torch's `grad` is None.
        """
        return dict(self._core.values.full("grad"))

    def set_grads(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Replaces gradients, after the window's last backward and before step.

        Args:
            grads: full averaged gradients by name, as `full_grads()` gives them (any subset); the
                same values on every rank.

        Raises:
            RuntimeFault: inside an accumulation window.
            ConfigError: if a name is not a trained parameter, or a value has the wrong shape.
        """
        for name, value in grads.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f'[front::set_grads] "{name}" is a {type(value).__name__}, not a tensor. Leave '
                    f"a name out to keep its gradient"
                )
        self._core.values.set_gradients(list(grads.items()))

    def name_of(self, param: torch.Tensor) -> str:
        """Returns the parameter's name in the model. Raises ConfigError for any other tensor."""
        name = self._structure.own.get(param)
        if name is None:
            raise ConfigError(
                "[front::name_of] the tensor is not a parameter of the engine's model. Pass a "
                "parameter of engine.module"
            )
        return str(name)

    def state_names(self) -> list[str]:
        """Returns torch's names of the moments that the engine keeps, such as "exp_avg".

        The list is empty if the optimizer computes in Python, or the engine is for inference.
        """
        none = self._external is not None or self.config.inference
        return [] if none else list(self.config.optimizer.moments)

    def param_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a copy of the state, fp32 in the parameter's shape ("step": a scalar).

        Args:
            param: a parameter of the model.
            name: "param" for the master, a moment ("exp_avg"), "step" for the number of updates
                of an optimizer that corrects for it (AdamW, Adam, Adagrad), or "residual" for the
                rounding errors of a lossy wire (`table.residual.rest`), which later gradients
                compensate.

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
        """Returns the first index of this rank's elements in the flattened parameter, and a copy of
        the elements, fp32."""
        begin, values = self._core.values.local_state(self.name_of(param), name)
        return int(begin), values

    def set_local_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Replaces this rank's elements. `values` has as many as `local_state()` returns."""
        self._core.values.set_local_state(self.name_of(param), name, values)
