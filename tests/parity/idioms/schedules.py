"""Schedulers of the learning rate, given to the engine or stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs

from idioms import nets
from idioms.table import IN_MEMORY, Group, refused
from idioms.trial import adamw

rows = Group("Schedules")
ONE = (1,)
COUNT = 4


def given(t: Any, make: Callable[[Any], Any], optimizer: Any = adamw) -> dict[str, Any]:
    """The engine steps it."""
    t.start(optimizer=optimizer, lr_scheduler=make)
    rates = []
    for step in t.steps(COUNT):
        rates.append(t.optimizer.param_groups[0]["lr"])
        t.engine.backward(t.loss(step))
        t.engine.step()
    return {"rates": rates}


@rows("`StepLR`, given to the engine")
def step_lr(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: lrs.StepLR(optimizer, 2, 0.1))


@rows("`LambdaLR`")
def lambda_lr(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: lrs.LambdaLR(optimizer, lambda n: 1 / (n + 1)))


@rows("`CosineAnnealingWarmRestarts`")
def restarts(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: lrs.CosineAnnealingWarmRestarts(optimizer, 2))


@rows("`OneCycleLR`, which cycles AdamW's betas")
def one_cycle(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: lrs.OneCycleLR(optimizer, 0.02, total_steps=6))


@rows("`OneCycleLR` with an SGD that has momentum")
def one_cycle_momentum(t: Any) -> dict[str, Any]:
    return given(
        t,
        lambda optimizer: lrs.OneCycleLR(optimizer, 0.02, total_steps=6),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    )


@rows("`OneCycleLR` with an SGD that has no momentum", refused("momentum"))
def one_cycle_plain(t: Any) -> dict[str, Any]:
    return given(
        t,
        lambda optimizer: lrs.OneCycleLR(optimizer, 0.02, total_steps=6),
        lambda params: torch.optim.SGD(params, lr=0.01),
    )


@rows("`CyclicLR`")
def cyclic(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: lrs.CyclicLR(optimizer, 1e-3, 2e-2, 2, cycle_momentum=False))


@rows("`SequentialLR` of a warm-up and a decay")
def sequential(t: Any) -> dict[str, Any]:
    def make(optimizer: Any) -> Any:
        parts = [lrs.LinearLR(optimizer, 0.1, 1.0, 2), lrs.ExponentialLR(optimizer, 0.5)]
        return lrs.SequentialLR(optimizer, parts, [2])

    return given(t, make)


@rows("`ChainedScheduler`")
def chained(t: Any) -> dict[str, Any]:
    def make(optimizer: Any) -> Any:
        parts = [lrs.ConstantLR(optimizer, 0.1, 2), lrs.ExponentialLR(optimizer, 0.9)]
        return lrs.ChainedScheduler(parts, optimizer)

    return given(t, make)


@rows("`SWALR`")
def swa_lr(t: Any) -> dict[str, Any]:
    return given(t, lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, 2))


@rows("a scheduler of your own, a subclass of `LRScheduler`")
def own_scheduler(t: Any) -> dict[str, Any]:
    class Halves(lrs.LRScheduler):
        def get_lr(self) -> list[float]:
            return [rate * 0.5**self.last_epoch for rate in self.base_lrs]

    return given(t, lambda optimizer: Halves(optimizer))


@rows("a scheduler of your own, an object with `step()`")
def own_object(t: Any) -> dict[str, Any]:
    class Sets:
        def __init__(self, optimizer: Any):
            self.optimizer, self.calls = optimizer, 0

        def step(self) -> None:
            self.calls += 1
            self.optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.calls)

    return given(t, lambda optimizer: Sets(optimizer))


@rows("a scheduler built on the optimizer before `initialize`, given to it")
def built_before(t: Any) -> dict[str, Any]:
    model = nets.build()
    optimizer = adamw(model.parameters())
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    t.start(model, optimizer, scheduler)
    t.train(3)
    return {"rate": t.optimizer.param_groups[0]["lr"], "last": scheduler.get_last_lr()}


# ---- by hand


def by_hand(t: Any, make: Callable[[Any], Any], optimizer: Any = adamw) -> dict[str, Any]:
    t.start(optimizer=optimizer)
    scheduler, rates = make(t.optimizer), []
    for step in t.steps(COUNT):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            scheduler.step()
        rates.append(t.optimizer.param_groups[0]["lr"])
    return {"rates": rates}


@rows("`StepLR`, stepped by hand")
def hand_step(t: Any) -> dict[str, Any]:
    return by_hand(t, lambda optimizer: lrs.StepLR(optimizer, 1, 0.5))


@rows("`OneCycleLR`, stepped by hand")
def hand_cycle(t: Any) -> dict[str, Any]:
    return by_hand(t, lambda optimizer: lrs.OneCycleLR(optimizer, 0.02, total_steps=6))


@rows("two schedulers, stepped by hand")
def hand_two(t: Any) -> dict[str, Any]:
    class Both:
        def __init__(self, optimizer: Any):
            self.parts = [lrs.ExponentialLR(optimizer, 0.5), lrs.StepLR(optimizer, 2, 3.0)]

        def step(self) -> None:
            for part in self.parts:
                part.step()

    return by_hand(t, Both)


@rows("a scheduler by hand with an optimizer that steps on shards", tier=IN_MEMORY)
def hand_on_shards(t: Any) -> dict[str, Any]:
    return by_hand(
        t,
        lambda optimizer: lrs.ExponentialLR(optimizer, 0.5),
        lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-2),
    )


@rows("a scheduler built before `initialize`, stepped by hand")
def hand_before(t: Any) -> dict[str, Any]:
    model = nets.build()
    optimizer = adamw(model.parameters())
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    t.start(model, optimizer)
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            scheduler.step()
    return {"last": scheduler.get_last_lr()}


def plateau(t: Any, scheduler: Any) -> dict[str, Any]:
    rates = []
    for step in t.steps(COUNT):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            scheduler.step(1.0 + len(rates))
            rates.append(t.optimizer.param_groups[0]["lr"])
    return {"rates": rates}


@rows("`ReduceLROnPlateau`, stepped by hand")
def hand_plateau(t: Any) -> dict[str, Any]:
    t.start()
    return plateau(t, lrs.ReduceLROnPlateau(t.optimizer, patience=0))


@rows("`ReduceLROnPlateau`, given to the engine and stepped by hand")
def given_plateau(t: Any) -> dict[str, Any]:
    def make(optimizer: Any) -> Any:
        return lrs.ReduceLROnPlateau(optimizer, patience=0)

    if t.plain:
        t.start()
        return plateau(t, make(t.optimizer))
    t.start(lr_scheduler=make)
    return plateau(t, t.engine.lr_scheduler)


@rows("a scheduler's `state_dict`, loaded into another one")
def saved(t: Any) -> dict[str, Any]:
    t.start()
    first = lrs.CosineAnnealingLR(t.optimizer, 6)
    t.train(1)
    first.step()
    second = lrs.CosineAnnealingLR(t.optimizer, 6)
    second.load_state_dict(first.state_dict())
    t.train(1, start=1)
    second.step()
    t.train(1, start=2)
    return {"last": second.get_last_lr()}


@rows("`engine.lr_scheduler.get_last_lr()` for a log")
def last_lr(t: Any) -> dict[str, Any]:
    t.start(lr_scheduler=lambda optimizer: lrs.ExponentialLR(optimizer, 0.5))
    t.train(2)
    return {"last": t.engine.lr_scheduler.get_last_lr()}


@rows("a learning rate set by hand under a scheduler that multiplies")
def set_and_scheduled(t: Any) -> None:
    t.start(lr_scheduler=lambda optimizer: lrs.MultiplicativeLR(optimizer, lambda _: 0.9))
    t.train(1)
    t.optimizer.param_groups[0]["lr"] = 0.05
    t.train(2, start=1)


@rows("a scheduler that raises once; training goes on", accumulate=ONE)
def raising(t: Any) -> None:
    class Raises:
        def __init__(self, optimizer: Any):
            self.calls = 0

        def step(self) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    t.start(lr_scheduler=lambda optimizer: Raises(optimizer))
    for step in range(4):
        t.engine.backward(t.loss(step))
        try:
            t.engine.step()
        except KeyboardInterrupt:
            pass


@rows("a learning-rate range test, then a return to the first weights", accumulate=ONE)
def range_test(t: Any) -> None:
    t.start(optimizer=lambda params: torch.optim.SGD(params, lr=1e-4))
    with t.engine.gathered():
        first = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    for step in range(3):
        t.optimizer.param_groups[0]["lr"] *= 4
        t.engine.backward(t.loss(step))
        t.engine.step()
    with t.engine.gathered(write=True), torch.no_grad():
        for name, p in t.model.named_parameters():
            p.copy_(first[name])
    t.optimizer.param_groups[0]["lr"] = 1e-2
    t.train(2, start=3)
