"""Engines of the model that foreign checkpoints are of, and what they do after a load."""

from __future__ import annotations

import torch
import trained
from test_api import initialize

STEPS = range(trained.BEFORE, trained.BEFORE + trained.AFTER)


def engine_of(config=None, named=False, scheduler=True):
    torch.manual_seed(5)  # other weights than the checkpoint's
    model = trained.Model()
    groups = trained.groups(model)
    if named:
        names = {param: name for name, param in model.named_parameters()}
        for group in groups:
            group["params"] = [(names[param], param) for param in group["params"]]
    optimizer = torch.optim.AdamW(groups, **trained.GROUPS)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, **trained.SCHEDULE)
    return initialize(
        model, config or {}, optimizer=optimizer, lr_scheduler=schedule if scheduler else None
    )


def losses_of(engine, rank=0):
    losses = []
    for step in STEPS:
        loss = engine(trained.batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
