"""The part of the engine that weights gradients. It is needed because a script may call
loss.backward() itself. Such a loss is not divided by the accumulation steps, and in fp16 it may not
be scaled."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._refusal import DeepSpeedRefusal
from ..utils.logging import warning_once
from .zero.state_placeholders import is_readable

_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()  # those that are not destroyed


class BackwardWeights:
    """The part of DeepSpeedEngine that weights the gradients of a backward."""

    native: Any
    module: torch.nn.Module
    basic_optimizer: Any
    _config: Any
    _reduction: str
    _summed: float
    _in_forward = False
    _module_hook: Any = None
    _unscaled = False  # whether a plain backward of an unscaled loss may follow
    gradient_accumulation_steps: Any
    _need_optimizer: Any

    def _after_module(self, *_: Any) -> None:
        """Lets a plain `loss.backward()` follow a call of `engine.module` in fp16, as in DeepSpeed.

        The gradients of the unscaled loss are weighted with the loss scale in fp32.
        """
        recomputes = torch._C._current_graph_task_id() != -1
        if self._in_forward or recomputes or not torch.is_grad_enabled():
            return
        warning_once(
            "engine.module was called with fp16. A plain loss.backward() would not scale the loss, "
            "so small gradients may be 0: use engine.backward() or engine.scale(loss).backward()"
        )
        self.native._core.resume_backward()
        self._unscaled = True
        self._weigh(1.0)

    def _weigh(self, divided_by: float, scaled_by: float | None = None) -> None:
        """Sets the weight of gradients from a loss that was divided by `divided_by`.

        A plain `loss.backward()` does not divide the loss, so its gradients are weighted when they
        reach the parameters. `scaled_by` is the loss scale of the loss; default: this engine's, or
        1 if the loss is not scaled.
        """
        if self._reduction == "sum":
            weight = divided_by / self.gradient_accumulation_steps()
            if self._config.fp16_enabled or scaled_by is not None:
                own = self.native.loss_scale
                weight *= own / (scaled_by or (1.0 if self._unscaled else own))
            self.native.set_backward_weight(weight * self._summed)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale (fp16), for a plain `.backward()`.

        Raises ConfigError without an optimizer, or if the loss is not a scalar with a graph.
        """
        self._need_optimizer("scale")
        if loss.numel() != 1 or loss.grad_fn is None:
            raise DeepSpeedRefusal(
                f"[deepspeed::scale] the loss has shape {tuple(loss.shape)}; it must be a scalar "
                f"tensor with grad_fn, as in DeepSpeed. For other tensors, call "
                f"tensor.backward(gradient)"
            )
        return self._weighted(self.native.scale(loss))

    def _weighted(self, scaled: torch.Tensor) -> torch.Tensor:
        """Returns a loss with this engine's loss scale. While its backward runs, gradients of all
        engines are weighted for that scale.
        """

        def begins(_: torch.Tensor) -> None:
            self._loss_scaled()
            torch.autograd.Variable._execution_engine.queue_callback(self._weigh_all)

        self._unscaled = False
        if scaled.requires_grad:
            scaled.register_hook(begins)  # type: ignore[no-untyped-call]
        return scaled

    def _leave_module(self) -> None:
        """Must be called when the engine is closed, because another engine may train the model."""
        if self._module_hook is not None:
            self._module_hook.remove()
        _ENGINES.discard(self)

    def _take_gradients(self) -> None:
        """Uses the `.grad` tensors that a script has set at stage 0, as DeepSpeed does.

        In fp16 they include the loss scale. They are averaged over ranks. Parameters without a
        `.grad` get no gradient.
        """
        params = [one for group in self.basic_optimizer.param_groups for one in group["params"]]
        if not params or params[0].grad is None or not is_readable(params[0].grad):
            return
        scale = self.native.loss_scale
        given = [(one, one.grad.float() / scale) for one in params if one.grad is not None]
        for one in params:
            one.grad = None
        before = self.module.__dict__.get("forward")
        self.module.forward = lambda: sum((one.float() * grad).sum() for one, grad in given)
        self._in_forward = True
        try:
            loss = self.native()
        finally:
            self._in_forward = False
            del self.module.forward
            if before is not None:
                self.module.forward = before
        self.native.set_backward_weight(1.0)
        self.native.backward(loss, gradient=torch.ones_like(loss))
        self._weigh(1.0)

    def _loss_scaled(self) -> None:
        """Sets the weights for a loss that has this engine's loss scale."""
        self._unscaled = False
        for one in _ENGINES:
            one._weigh(1.0, self.native.loss_scale)

    def _weigh_all(self) -> None:
        """Sets the weights for losses that are not divided and have their engine's loss scale."""
        for one in list(_ENGINES):
            one._weigh(1.0)
