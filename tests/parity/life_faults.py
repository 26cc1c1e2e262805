"""What strikes an engine in its life (lives.py): armed before a step, it raises once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Trial = Any  # of lives.py


class Planned(Exception):
    """Raised on purpose."""


class Blow:
    """Raises when it is called, once and on the ranks that are struck."""

    def __init__(self, raised: type[BaseException] = Planned) -> None:
        self.raised, self.armed = raised, True

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise self.raised("planned")


class Hurts(torch.autograd.Function):
    """The identity, whose backward is a blow."""

    @staticmethod
    def forward(ctx, x, blow):
        ctx.blow = blow
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.blow()
        return gradient, None


def in_forward(trial: Trial) -> None:
    trial.add(trial.model.blocks[1].register_forward_pre_hook(Blow()))


def after_forward(trial: Trial) -> None:
    blow = Blow(KeyboardInterrupt)
    trial.add(trial.model.blocks[0].register_forward_hook(lambda *_: blow()))


def in_layer(trial: Trial) -> None:
    blow = Blow()
    trial.add(trial.model.blocks[1].down.register_forward_hook(lambda *_: blow()))


def in_backward(trial: Trial) -> None:
    blow = Blow()
    hook = trial.model.blocks[0].register_forward_hook(lambda _m, _i, out: Hurts.apply(out, blow))
    trial.add(hook)


def in_recomputation(trial: Trial) -> None:
    blow = Blow()

    def strike(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            blow()

    trial.add(trial.model.blocks[1].up.register_forward_pre_hook(strike))


def in_tensor_hook(trial: Trial) -> None:
    blow = Blow(KeyboardInterrupt)
    hook = trial.model.blocks[1].register_forward_hook(
        lambda _m, _i, out: out.register_hook(blow) and None
    )
    trial.add(hook)


def in_grad_hook(trial: Trial) -> None:
    trial.add(trial.model.blocks[0].norm2.weight.register_hook(Blow()))


def in_loss(trial: Trial) -> None:
    trial.blow = Blow()


def before_update(trial: Trial) -> None:
    trial.add(trial.engine.optimizer.register_step_pre_hook(Blow()))


def after_update(trial: Trial) -> None:
    trial.add(trial.engine.optimizer.register_step_post_hook(Blow()))


def in_gathered(trial: Trial) -> None:
    with trial.engine.gathered():
        trial.model.tokens.weight.sum()
        if trial.struck:
            raise Planned


def in_written(trial: Trial) -> None:
    with trial.engine.gathered(write=True), torch.no_grad():
        raise Planned


def in_state_dict(trial: Trial) -> None:
    blow = Blow()
    if dist_rank() == 0:  # where such hooks run
        trial.add(trial.model.blocks[0].register_state_dict_post_hook(lambda *_: blow()))
    trial.engine.state_dict()
    if dist_rank() != 0:
        raise Planned


def in_evaluation(trial: Trial) -> None:
    in_layer(trial)
    with torch.no_grad():
        trial.engine(*trial.part())


def refused(trial: Trial) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: trial.engine.backward(3),
        lambda: trial.engine.set_grads({"nobody": torch.ones(1)}),
        lambda: trial.engine.optimizer.step(),
        lambda: trial.engine.optimizer.state_dict(),
        lambda: trial.engine.state_dict(dtype=torch.int8),
        lambda: trial.engine.gathered([torch.ones(1)]).__enter__(),
    ]
    calls[trial.life.seed % len(calls)]()


def not_finite(trial: Trial) -> None:
    hook = trial.model.blocks[1].register_forward_hook(lambda _m, _i, out: out * float("inf"))
    trial.add(hook)


def on_disk(trial: Trial) -> None:
    trial.fill_disk()


def interrupt(trial: Trial) -> None:
    trial.interrupts = trial.life.line


FAULTS: dict[str, Callable[[Trial], None] | None] = {
    "none": None,
    "forward": in_forward,
    "after forward": after_forward,
    "layer": in_layer,
    "backward": in_backward,
    "recomputation": in_recomputation,
    "tensor hook": in_tensor_hook,
    "grad hook": in_grad_hook,
    "loss": in_loss,
    "before update": before_update,
    "after update": after_update,
    "gathered": in_gathered,
    "written": in_written,
    "state_dict": in_state_dict,
    "evaluation": in_evaluation,
    "refused": refused,
    "not finite": not_finite,
    "disk": on_disk,
    "interrupt": interrupt,
    "interrupted start": None,
    "interrupted end": None,
    "no such folder": None,
    "two schedules": None,
    "compiled": None,
    "optimizer of others": None,
    "raising scheduler": None,
    "raising set-up": None,
}
# Calls that all ranks make together: the others would wait, or an error that comes to all.
EVERYWHERE = {"not finite", "refused", "disk", "state_dict", "written", "gathered", "evaluation"}
EVERYWHERE |= {"no such folder", "two schedules", "compiled", "optimizer of others", "none"}
EVERYWHERE |= {"raising scheduler", "raising set-up"}
STARTS = {"no such folder", "two schedules", "compiled", "optimizer of others"}
STARTS |= {"raising scheduler", "raising set-up", "interrupted start"}
LINES = {"interrupt": 700, "interrupted start": 900, "interrupted end": 40}


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def interrupted(after: int | None) -> Iterator[None]:
    """A KeyboardInterrupt once so many lines of the front have run, as a signal may raise it."""
    left = after

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal left
        if "/penstock/" not in frame.f_code.co_filename:
            return None
        if event == "line" and left is not None:
            left -= 1
            if left < 0:
                left = None
                sys.settrace(None)
                raise KeyboardInterrupt("planned")
        return trace

    if after is None:
        yield
        return
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
