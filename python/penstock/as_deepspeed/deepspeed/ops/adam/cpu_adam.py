"""Adam: uses the engine's kernels inside an engine, and its own step outside."""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock import ConfigError
from penstock.front import optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse(name: str, bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction:
        raise ConfigError(
            f"[deepspeed::{name}] bias_correction=False is not supported: the bias of moments is "
            f"always corrected"
        )
    if amsgrad:
        raise ConfigError(f"[deepspeed::{name}] amsgrad is not supported: use torch.optim.Adam")


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay if `adamw_mode` is True.

    Outside an engine it computes in fp32. Moments are fp32, or with `fp32_optimizer_states=False`
    in the dtype of their parameter (inside an engine: bf16). Raises ConfigError for
    bias_correction=False and amsgrad=True.
    """

    optimizer_id = 0

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse(type(self).__name__, bias_correction, amsgrad)
        super().__init__(
            model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode
        )
        self.adam_w_mode, self.fp32_optimizer_states = adamw_mode, fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have a `.grad`, and returns the closure's loss."""
        for group in self.param_groups:
            refuse(type(self).__name__, True, group["amsgrad"])
        return optimizer.update_each(self, closure, self._update)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state. torch's own method would cast the moments to the parameters' dtype."""
        super().load_state_dict(state_dict)
        ids = [one for group in state_dict["param_groups"] for one in group["params"]]
        params = [one for group in self.param_groups for one in group["params"]]
        for number, param in zip(ids, params, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in _MOMENTS:
                if name in saved:
                    dtype = self._moments_dtype(param)
                    self.state[param][name] = saved[name].to(param.device, dtype, copy=True)

    def _moments_dtype(self, param: torch.Tensor) -> torch.dtype:
        wide = self.fp32_optimizer_states and param.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if wide else param.dtype

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, dtype = self.state[param], self._moments_dtype(param)
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {name: torch.zeros_like(param, dtype=dtype) for name in _MOMENTS}
        state["step"] += 1
        count, lr, (first, second) = float(state["step"]), float(group["lr"]), group["betas"]
        wide = torch.promote_types(param.dtype, torch.float32)
        value, gradient = param.to(wide), param.grad.to(wide)  # type: ignore[union-attr]
        mean, square = (state[name].to(wide) for name in _MOMENTS)
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"] and not self.adam_w_mode:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["weight_decay"] and self.adam_w_mode:
            value.mul_(1 - lr * group["weight_decay"])
        scale = square.sqrt().div_(math.sqrt(1 - second**count)).add_(group["eps"])
        value.addcdiv_(mean, scale, value=-lr / (1 - first**count))
        for to, of in ((param, value), (state[_MOMENTS[0]], mean), (state[_MOMENTS[1]], square)):
            if to is not of:
                to.copy_(of)


optimizer.register(DeepSpeedCPUAdam, "Adam")
