"""Plain torch under the engine's method names, so that one loop drives both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from fuzz_cases import Case
from torch import nn
from training import Tensors


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675, algorithm 2."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in (param for param in group["params"] if param.grad is not None):
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                direction = (beta1 * moment + (1 - beta1) * param.grad).sign()
                param.sub_(group["lr"] * (direction + group["weight_decay"] * param))
                moment.mul_(beta2).add_(param.grad, alpha=1 - beta2)


def make_optimizer(
    case: Case, lion: type[torch.optim.Optimizer], params: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    trained = [param for param in params if param.requires_grad]
    kind = lion if case.optimizer == "Lion" else getattr(torch.optim, case.optimizer)
    if case.groups == 1:
        return kind(trained, **dict(case.options))
    small = [param for param in trained if param.ndim < 2]
    large = [param for param in trained if param.ndim >= 2]
    others = {"lr": 0.3 * dict(case.options)["lr"], "weight_decay": 0.0}
    return kind([{"params": large}, {"params": small, **others}], **dict(case.options))


def lr_factor(step: int, type: str, warmup_steps=0, total_steps=0, min_ratio=0.0) -> float:
    """Of the peak learning rate, in step 1, 2, ..."""
    if step < warmup_steps:
        return step / warmup_steps
    if type == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    left = (1 + math.cos(math.pi * done)) / 2 if type == "cosine" else 1 - done
    return min_ratio + (1 - min_ratio) * left


class Plain:
    """One process that is called for every rank's samples in turn."""

    def __init__(self, case: Case, model: nn.Module):
        self.case = case
        self.module = model
        self.masters = {
            name: nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            for name, param in model.named_parameters()
        }
        if case.precision == "bf16":
            for param in model.parameters():
                param.data = param.data.bfloat16()
        self.optimizer = make_optimizer(case, Lion, self.masters.values())
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.backwards = self.steps = 0
        self.grad_norm = 0.0
        self._schedule()

    def _schedule(self) -> None:
        if not self.case.schedule:
            return
        factor = lr_factor(self.steps + 1, **dict(self.case.schedule))
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    @property
    def _seen(self) -> int:
        return self.backwards // self.case.world

    @property
    def _divisor(self) -> int:
        return min(self._seen, self.case.accumulate) * self.case.world

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)
        self.backwards += 1
        for name, param in self.module.named_parameters():
            if param.grad is None:
                continue
            master = self.masters[name]
            share = param.grad.float()
            master.grad = share if master.grad is None else master.grad + share
            param.grad = None

    def full_grads(self) -> Tensors:
        return {
            name: master.grad / self._divisor
            for name, master in self.masters.items()
            if master.grad is not None
        }

    def set_grads(self, grads: Tensors) -> None:
        for name, grad in grads.items():
            self.masters[name].grad = grad * self._divisor

    def step(self, force: bool = False) -> bool:
        if self._seen < self.case.accumulate and not force:
            return False
        for master in self.masters.values():
            if master.grad is not None:
                master.grad /= self._divisor
        limit = self.case.clip or math.inf
        self.grad_norm = float(nn.utils.clip_grad_norm_(self.masters.values(), limit))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, param in self.module.named_parameters():
            param.data.copy_(self.masters[name].detach())
        self.backwards = 0
        self.steps += 1
        self._schedule()
        return True

    def state_dict(self) -> Tensors:
        self.module.float()
        for name, param in self.module.named_parameters():
            param.data.copy_(self.masters[name].detach())
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)
