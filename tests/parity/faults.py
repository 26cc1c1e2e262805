"""Ranks that die, stop, raise or diverge while they train: what they do, and what the others must
say of it in time."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import back_ends
import cases
import models
import psutil
import torch
import torch.distributed as dist
import training
from ranks import Failure, Pool, note
from torch import nn
from training import Case

WORLD, CULPRIT = 4, 2
TIMEOUT_S = 12
# For two shared cores to schedule the last of the ranks.
SLACK_S = 8
FIRST, LAST = 4, 6  # step of the fault, and of the run if nothing comes of it
EVERY = frozenset([*cases.STRATEGIES, *cases.NODE_STRATEGIES])
FREES_PARAMS = frozenset(["zero3", "hpz", "mics"])


def nothing(engine, model):
    pass


def fail(*_):
    raise ValueError("this rank's data is bad")


def raise_in_forward(engine, model):
    model.blocks[1].register_forward_pre_hook(fail)


def raise_in_backward(engine, model):
    def watch(_module, _inputs, output):
        output.register_hook(fail)

    model.blocks[1].register_forward_hook(watch)


def raise_in_step(engine, model):
    engine._external._step = fail


def skip_a_unit(engine, model):
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])


def reverse_units(engine, model):
    model.blocks = nn.ModuleList(reversed(model.blocks))


def read_state(engine, model):
    engine.state_dict()


def read_params(engine, model):
    with engine.gathered():
        pass


def read_gradients(engine, model):
    engine.full_grads()


def leave(engine, model):
    return "left"


def leave_process(engine, model):
    os._exit(0)


@dataclass(frozen=True)
class Fault:
    """What one rank does in a step, and what comes of it."""

    # Called on that rank before the step's forward, and after its backward; "left" ends its loop.
    before: Callable[..., Any] = nothing
    after: Callable[..., Any] = nothing
    first: int = FIRST  # 0: in initialize()
    model: Callable[[], nn.Module] = models.Gpt
    config: dict[str, Any] = field(default_factory=dict)
    signum: int = 0  # sent by the parent, at some moment in training
    culprit: int = CULPRIT
    own: str = "RuntimeFault"  # how that rank ends: the kind of its error, or "dead"
    # What the errors of the others say.
    says: str = rf"rank {CULPRIT}\b"
    step: str = rf"step {FIRST}\b"
    roll_call: bool = True  # where each rank was
    harmless: frozenset[str] = frozenset()  # strategies that go on as if nothing had happened

    @property
    def deadly(self) -> bool:
        return self.own == "dead"


DEAD = rf"rank {CULPRIT} is dead or stopped"
# A rank that has closed its engine does not answer any more.
RAISES = {"own": "ValueError", "says": rf"rank {CULPRIT} is at step {FIRST}\b|{DEAD}"}
AT_SOME_STEP = {"says": DEAD, "step": r"step \d+", "own": "dead"}
UNLIKE = {"first": 0, "roll_call": False, "step": r"initialize"}
ALONE = {"culprit": 0, "says": r"rank 0 (is|failed) at [^;]*(`read |off plan`)"}
KEEP_PARAMS = EVERY - FREES_PARAMS
FAULTS = {
    "raises in forward": Fault(before=raise_in_forward, **RAISES),
    "raises in backward": Fault(before=raise_in_backward, **RAISES),
    # The others may wait for it in the next step only.
    "raises in step": Fault(before=raise_in_step, step=rf"step ({FIRST}|{FIRST + 1})\b", **RAISES),
    "killed": Fault(signum=signal.SIGKILL, **AT_SOME_STEP),
    "stopped": Fault(signum=signal.SIGSTOP, **AT_SOME_STEP),
    "skips a unit": Fault(before=skip_a_unit, harmless=EVERY),
    "skips a unit at once": Fault(before=skip_a_unit, first=1, harmless=EVERY),
    "reverses its units": Fault(before=reverse_units, harmless=KEEP_PARAMS),
    "reverses its units at once": Fault(
        before=reverse_units, first=1, step=r"step 1\b", harmless=KEEP_PARAMS
    ),
    "state_dict on one rank": Fault(before=read_state, harmless=frozenset(["ddp"]), **ALONE),
    "gathered on one rank": Fault(before=read_params, harmless=KEEP_PARAMS, **ALONE),
    "full_grads on one rank": Fault(after=read_gradients, **ALONE),
    "leaves its loop and closes": Fault(before=leave),
    "leaves its process": Fault(before=leave_process, own="dead", says=DEAD),
    "other model": Fault(model=lambda: models.Gpt(blocks=2), **UNLIKE),
    "other config": Fault(config={"clip": 0.5}, **UNLIKE),
}


def warm_up(device):
    """One step without haste: on a busy machine a rank's first imports outlast the timeout."""
    import penstock  # noqa: PLC0415

    model = training.moved(models.Gpt(), device)
    engine = penstock.initialize(model, Case("zero3", world=WORLD).config())
    batch = models.batches("gpt", 1, WORLD * training.MICRO)[0]
    training.backwards(engine, batch, 1, device=device)
    engine.step()
    engine.close()


TENSOR_RULES = {
    "tokens": "vocab",
    "head": "vocab",
    "*.qkv": "column:3",
    "*.proj": "row",
    "*.up": "column",
    "*.down": "row",
    "*.heads": "divide",
}


def suffer(name, strategy, offload, accelerated, tensor):
    """On a rank: trains until the fault ends it; "trained" if nothing came of it."""
    import penstock  # noqa: PLC0415

    device = "cpu"
    if accelerated:
        import on_device  # noqa: PLC0415 - makes a process one that has the device

        on_device.schedule(1)
        device = on_device.device()
    warm_up(device)
    note("ready")
    fault = FAULTS[name]
    mine = dist.get_rank() == fault.culprit
    model = training.moved(fault.model() if mine else models.Gpt(), device)
    back_end = "auto" if accelerated else back_ends.of_case((name, strategy, tensor))
    config = Case(strategy, world=WORLD).config()
    config |= {"comm": {"timeout_s": TIMEOUT_S, "backend": back_end}, "offload": offload}
    if tensor > 1:
        config |= {"mesh": {"tensor": tensor}, "parallel": {"rules": TENSOR_RULES}}
    optimizer = None
    if fault.before is raise_in_step:  # no optimizer of the engine's own calls step()
        optimizer = torch.optim.RMSprop
        del config["optimizer"]
    engine = penstock.initialize(
        model,
        config | (fault.config if mine else {}),
        optimizer=None if optimizer is None else lambda params: optimizer(params),
    )
    batch = models.batches("gpt", 1, WORLD * training.MICRO)[0]
    try:
        step = 1
        while fault.signum or step <= LAST:
            if step == FIRST:
                note("training")
            strikes = mine and step == fault.first
            if strikes and fault.before(engine, model) == "left":
                return "left"
            training.backwards(engine, batch, 1, device=device)
            if strikes:
                fault.after(engine, model)
            engine.step()
            step += 1
        return "trained"
    finally:
        engine.close()


@contextlib.contextmanager
def ranks_for(fault, pools):
    """Four ranks, that no other test gets if one of them is to die; that one outlives nothing."""
    if not fault.deadly:
        pool = pools(WORLD)
        try:
            yield pool
        except BaseException:
            pool.kill()
            raise
        return
    pool = Pool(WORLD)
    pids = [process.pid for process in pool.processes]
    try:
        yield pool
        pool.processes[fault.culprit].kill()  # it may be stopped
        codes = [code for rank, code in enumerate(pool.close()) if rank != fault.culprit]
        assert codes == [0] * (WORLD - 1), f"exit codes of the survivors: {codes}"
    finally:
        pool.kill()
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        assert not left, f"ranks outlived their pool: {left}"


def outcomes_of(pool, name, strategy, seed, **place):
    """Of each rank that lives, with all of them in time."""
    fault = FAULTS[name]
    offload, accelerated = place.get("offload", {}), place.get("accelerated", False)
    pool.start(suffer, name, strategy, offload, accelerated, place.get("tensor", 1))
    pool.notes("ready", timeout=240)
    if fault.first == FIRST:
        pool.notes("training", timeout=240)
    if fault.signum:
        # The moment is the test's parameter.
        time.sleep(random.Random(f"{name}{strategy}{seed}").uniform(0.0, 0.5))
        os.kill(pool.processes[fault.culprit].pid, fault.signum)
    living = set(range(WORLD)) - ({fault.culprit} if fault.deadly else set())
    outcomes = pool.outcomes(living, TIMEOUT_S + SLACK_S)
    assert set(outcomes) == living, f"hangs: {living - set(outcomes)}; the others: {outcomes}"
    return outcomes


def assert_names(fault, rank, text):
    """A survivor's error names culprit and step, and says where each rank was."""
    if "the ranks made different calls" in text:  # found long before the timeout
        assert re.search(rf"rank {fault.culprit}\b", text), f"rank {rank}: {text}"
        assert re.search(r"(step|collective) \d", text), f"rank {rank}: {text}"
        return
    assert re.search(fault.says, text), f"rank {rank}: {text}"
    assert re.search(fault.step, text), f"rank {rank} names no step: {text}"
    others = set(range(WORLD)) - {fault.culprit} if fault.roll_call else set()
    for other in others:
        assert re.search(rf"rank {other} (is|failed) at ", text), f"rank {rank}: {text}"


def check(name, strategy, seed, pools, **place):
    """All ranks end in time, and those that live say whose fault it was. `place`: `accelerated`,
    what is `offload`ed from there, and how many `tensor` ranks compute one model."""
    fault = FAULTS[name]
    with ranks_for(fault, pools) as pool:
        outcomes = outcomes_of(pool, name, strategy, seed, **place)
        if strategy in fault.harmless and place.get("tensor", 1) == 1:
            assert outcomes == dict.fromkeys(range(WORLD), "trained")
            return
        for rank, outcome in outcomes.items():
            if rank == fault.culprit and outcome == "left":
                continue  # nothing was left to wait for
            assert isinstance(outcome, Failure), f"rank {rank} {outcome}"
            if rank == fault.culprit and fault.own != "RuntimeFault":
                assert outcome.kind == f"builtins.{fault.own}", outcome.trace
            else:
                assert outcome.is_a("RuntimeFault"), f"rank {rank}: {outcome.trace}"
                assert_names(fault, rank, outcome.text)
