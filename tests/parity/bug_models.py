"""Models and an optimizer that the tests of known bugs (test_known_bugs.py) need."""

from __future__ import annotations

import models
import torch
import torch.nn.functional as F
from torch import nn


class Routed(nn.Module):
    """An fp32 router and fp32 frequencies in a body of another dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body, self.router = nn.Linear(models.FEATURES, 8), nn.Linear(8, 2)
        self.register_buffer("inv_freq", 1e-4 ** torch.linspace(0, 1, 8))

    def forward(self, x):
        kinds = {self.inv_freq.dtype, self.router.weight.dtype, self.router.bias.dtype}
        assert kinds == {torch.float32}, kinds
        assert self.body.weight.dtype == torch.bfloat16
        hidden = self.body(x.bfloat16()).float() * (1 + self.inv_freq)
        return self.router(hidden).softmax(-1).pow(2).mean()


class PlainLion(torch.optim.Optimizer):
    """arXiv:2302.06675, algorithm 2, in plain torch."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                update = moment.lerp(parameter.grad, 1 - beta1).sign()
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                moment.lerp_(parameter.grad, 1 - beta2)


class TwoParams(nn.Linear):
    def __init__(self):
        torch.manual_seed(7)
        super().__init__(models.FEATURES, 3)

    def forward(self, x, targets):
        return F.mse_loss(super().forward(x).sum(-1), targets)

    def groups(self):
        return [
            {"params": [self.weight], "lr": 0.01, "weight_decay": 0.3},
            {"params": [self.bias], "lr": 0.003},
        ]


class Slope(nn.Module):
    """Its gradient is 1, so plain descent moves the weight by the learning rate."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, factor):
        return self.weight.sum() * factor


class Branching(nn.Module):
    """Each call says which blocks it uses; the last one never is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.enter, self.leave = nn.Linear(models.FEATURES, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(models.OddBlock(7) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x, targets, used):
        x = self.enter(x)
        for index in used:
            x = self.blocks[index](x)
        if 0 in used:
            x = x * self.gain
        return F.mse_loss(self.leave(x).squeeze(-1), targets)
