"""No hang: a rank that dies, stops, raises or diverges ends all ranks in time, naming it."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import models
import psutil
import pytest
import torch.distributed as dist
import training
from ranks import Failure, Pool, note
from training import Case

WORLD, CULPRIT = 4, 2
TIMEOUT_S, SHORT_S = 20, 6
# For two shared cores to schedule the last of the ranks.
SLACK_S = 2


@pytest.fixture
def pool():
    """Four ranks of the test's own: none survives it."""
    pool = Pool(WORLD)
    pids = [process.pid for process in pool.processes]
    yield pool
    pool.kill()
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    assert not left, f"ranks outlived their pool: {left}"


def start(strategy, timeout_s):
    import penstock  # noqa: PLC0415

    config = Case(strategy, world=WORLD).config() | {"comm": {"timeout_s": timeout_s}}
    return penstock.initialize(models.build("gpt"), config)


def train_for_ever(strategy, timeout_s):
    """Ends with an error only; closes the engine on the way."""
    engine = start(strategy, timeout_s)
    batch = models.batches("gpt", 1, WORLD * training.MICRO)[0]
    step = 0
    try:
        while True:
            training.backwards(engine, batch, 1)
            engine.step()
            step += 1
            if step == 3:
                note("training")
    finally:
        engine.close()


def survivors_say(pool, timeout):
    """Each survivor's RuntimeFault, by rank, with all of them in time."""
    others = set(range(WORLD)) - {CULPRIT}
    began = time.monotonic()
    outcomes = pool.outcomes(others, timeout)
    took = time.monotonic() - began
    assert set(outcomes) == others, f"no word from {others - set(outcomes)} in {took:.0f} s"
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Failure), f"rank {rank} returned {outcome!r}"
        assert outcome.is_a("RuntimeFault"), f"rank {rank}: {outcome.trace}"
    return {rank: outcome.text for rank, outcome in outcomes.items()}


def assert_ends(pool):
    """The survivors' processes end by themselves."""
    codes = [code for rank, code in enumerate(pool.close(timeout=20)) if rank != CULPRIT]
    assert codes == [0] * (WORLD - 1), f"exit codes of the survivors: {codes}"


def strike(pool, strategy, signum, seed):
    """Sends the signal to one rank in the middle of training; what the others say."""
    pool.start(train_for_ever, strategy, TIMEOUT_S)
    pool.notes("training", timeout=60)
    time.sleep(random.Random(seed).uniform(0.0, 0.5))  # the moment is the test's parameter
    os.kill(pool.processes[CULPRIT].pid, signum)
    return survivors_say(pool, TIMEOUT_S + SLACK_S)


def assert_names_culprit(texts, why):
    for rank, text in texts.items():
        assert re.search(rf"rank {CULPRIT}\b[^;]*{why}", text), f"rank {rank}: {text}"
        assert re.search(r"step \d+", text), f"rank {rank} names no step: {text}"


def pytest_generate_tests(metafunc):
    """A pool and a timeout per test are slow: the daily run kills once, and stops under zero3."""
    full = metafunc.config.getoption("full")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", [1, 2, 3] if full else [1])
    if "stopped" in metafunc.fixturenames:
        metafunc.parametrize("stopped", ["zero3", "zero2", "ddp"] if full else ["zero3"])


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_killed_rank(strategy, seed, pool):
    texts = strike(pool, strategy, signal.SIGKILL, f"{strategy}{seed}")
    assert_names_culprit(texts, "(dead|died|stopped|gone)")
    assert_ends(pool)


def test_stopped_rank(stopped, pool):
    texts = strike(pool, stopped, signal.SIGSTOP, stopped)
    assert_names_culprit(texts, "(dead|died|stopped|gone)")
    pool.processes[CULPRIT].kill()
    assert_ends(pool)


class Failing(models.Gpt):
    calls = 0

    def forward(self, tokens, targets):
        self.calls += 1
        if self.calls == 4 and dist.get_rank() == CULPRIT:
            raise ValueError("this rank's data is bad")
        return super().forward(tokens, targets)


def raise_in_forward(strategy):
    import penstock  # noqa: PLC0415

    config = Case(strategy, world=WORLD).config() | {"comm": {"timeout_s": SHORT_S}}
    engine = penstock.initialize(Failing(), config)
    batch = models.batches("gpt", 1, WORLD * training.MICRO)[0]
    try:
        for _ in range(6):
            training.backwards(engine, batch, 1)
            engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_rank_that_raises_in_forward(strategy, pool):
    """That rank ends with the user's error, at once although it closes its engine; the others end
    in time, naming it and the step."""
    pool.start(raise_in_forward, strategy)
    own = pool.outcomes({CULPRIT}, timeout=30)[CULPRIT]
    assert own.kind == "builtins.ValueError", own.trace
    for rank, text in survivors_say(pool, SHORT_S + SLACK_S).items():
        assert re.search(rf"rank {CULPRIT}\b", text), f"rank {rank}: {text}"
        assert "step 4" in text, f"rank {rank}: {text}"
    assert_ends(pool)


class Branching(models.Gpt):
    """From the third call on, one rank runs its blocks in another order."""

    calls = 0

    def forward(self, tokens, targets):
        self.calls += 1
        blocks = list(self.blocks)
        if self.calls >= self.first and dist.get_rank() == CULPRIT:
            blocks.reverse()
        self.order = blocks
        return self.run(tokens, targets)

    first = 3

    def run(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.order:
            x = block(x)
        logits = self.head(self.norm(x))
        return models.F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def diverge(first):
    """Returns "trained" when the engine got along with it."""
    import penstock  # noqa: PLC0415

    model = Branching()
    model.first = first
    comm = {"timeout_s": SHORT_S, "bucket_bytes": 0}
    config = Case("zero3", world=WORLD).config() | {"comm": comm}
    engine = penstock.initialize(model, config)
    batch = models.batches("gpt", 1, WORLD * training.MICRO)[0]
    try:
        for _ in range(4):
            training.backwards(engine, batch, 1)
            engine.step()
        return "trained"
    finally:
        engine.close()


@pytest.mark.parametrize("first", [1, 3])
def test_divergent_order_ends_with_an_error(first, pool):
    """In step one, or after the plan was agreed."""
    pool.start(diverge, first)
    outcomes = pool.outcomes(set(range(WORLD)), timeout=30)
    assert set(outcomes) == set(range(WORLD)), f"hangs: {set(range(WORLD)) - set(outcomes)}"
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Failure), f"rank {rank} {outcome}"
        assert outcome.is_a("RuntimeFault", "Bug"), f"rank {rank}: {outcome.trace}"
        assert "rank" in outcome.text and re.search(r"\bu\d|blocks\.\d", outcome.text)
    codes = pool.close(timeout=20)
    assert codes == [0] * WORLD, f"exit codes: {codes}"
