"""The loop of a case, for the engine and for plain torch alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fuzz_cases import MICROS, SAMPLES, Case, Step
from fuzz_plain import Plain, make_optimizer
from training import Run, digest

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def _plain(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    x, target = next(batches)
    loss = F.mse_loss(engine(x, depth)[0], target)
    engine.backward(loss)
    return loss


def _contrast(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    (x, target), (other, _) = next(batches), next(batches)
    first, second = engine(x, depth)[0], engine(other, depth)[0]
    loss = F.mse_loss(first, target) + 0.5 * F.mse_loss(second, first)
    engine.backward(loss)
    return loss


def _penalty(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    x, target = next(batches)
    x.requires_grad_()
    output, _ = engine(x, depth)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    loss = F.mse_loss(output, target) + 0.01 * slope.square().mean()
    engine.backward(loss)
    return loss


def _vector(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    x, target = next(batches)
    output, _ = engine(x, depth)
    engine.backward(output, gradient=0.1 * (output - target).detach())
    return F.mse_loss(output, target)


def _late(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    losses = []
    for _ in range(2):
        x, target = next(batches)
        losses.append(F.mse_loss(engine(x, depth)[0], target))
    for loss in losses:
        engine.backward(loss)
    return sum(losses)


def _losses(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    x, target = next(batches)
    one, two = engine(x, depth)
    first, second = F.mse_loss(one, target), F.l1_loss(two, target)
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    return first + second


def _retain(engine: Any, batches: Batches, depth: int) -> torch.Tensor:
    x, target = next(batches)
    loss = F.mse_loss(engine(x, depth)[0], target)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    return loss


BODIES: dict[str, Callable[[Any, Batches, int], torch.Tensor]] = {
    "plain": _plain,
    "contrast": _contrast,
    "penalty": _penalty,
    "vector": _vector,
    "late": _late,
    "losses": _losses,
    "retain": _retain,
}


def _batches(case: Case, *key: int) -> Batches:
    number = 0
    while True:
        yield fuzz_models.batch(case.shape, SAMPLES, (case.seed, *key, number))
        number += 1


def _evaluate(engine: Any, case: Case, number: int) -> float:
    """The same samples on every rank."""
    engine.train(False)
    with torch.no_grad():
        x, target = next(_batches(case, number))
        loss = F.mse_loss(engine(x, len(case.shape.order))[0], target)
    engine.train(True)
    return loss.item()


def _prepare(engine: Any, step: Step, trained: set[str]) -> None:
    frozen = tuple(f"blocks.{index}." for index in step.frozen)
    for name, parameter in engine.module.named_parameters():
        if name in trained:
            parameter.requires_grad_(not name.startswith(frozen))
    for group in engine.optimizer.param_groups:
        group["lr"] *= step.lr_factor


def execute(case: Case, engine: Any, ranks: list[int]) -> Run:
    """`ranks` are those whose samples the engine is given: its own, or all in plain torch."""
    run = Run()
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    for number, step in enumerate(case.steps):
        if step.evaluate:
            run.losses.append(_evaluate(engine, case, number))
        _prepare(engine, step, trained)
        seen = 0
        for micro, kind in enumerate(step.micros):
            if 0 < seen < case.accumulate:
                assert engine.step() is False, "step() in the middle of a window changed weights"
            losses = [
                BODIES[kind](engine, _batches(case, number, micro, rank), step.depth).item()
                for rank in ranks
            ]
            run.losses.append(sum(losses) / len(ranks))
            seen += MICROS[kind]
        if number == 0:
            run.gradients = engine.full_grads()
        if step.edit and seen >= case.accumulate:
            edited = engine.full_grads().items()
            engine.set_grads({name: 0.5 * grad + 1e-3 for name, grad in edited})
        assert engine.step(force=seen < case.accumulate) is True, "step() changed nothing"
        run.norms.append(engine.grad_norm)
    run.weights = engine.state_dict()
    return run


def plain(case: Case) -> Run:
    model = fuzz_models.build(case.shape, case.seed)
    return execute(case, Plain(case, model), list(range(case.world)))


def train(case: Case) -> tuple[Run, str]:
    """On a rank: the run by Penstock (tensors on rank 0 only), and the digest of the model that
    close() leaves."""
    import penstock  # noqa: PLC0415 - the reference does without

    model = fuzz_models.build(case.shape, case.seed)
    optimizer: Any = None
    if case.given != "config":
        optimizer = functools.partial(make_optimizer, case, penstock.Lion)
    if case.given == "object":
        optimizer = optimizer(model.parameters())
    engine = penstock.initialize(model, case.config(), optimizer=optimizer)
    try:
        run = execute(case, engine, [dist.get_rank()])
    finally:
        engine.close()
    if dist.get_rank() > 0:
        run.gradients = {}
    return run, digest(model)
