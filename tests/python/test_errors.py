"""Errors say what is wrong and where: the key, the parameter, the rank, the step."""

from __future__ import annotations

import json
import pathlib
import re
import time

import models
import pytest
import torch
import torch.distributed as dist
import training
from ranks import Failure
from torch import nn
from training import Case

every_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
# Ranks that disagree wait for each other: short, so that the test is.
SHORT = {"comm": {"timeout_s": 20}}


def initialize(model, config=None, **others):
    import penstock  # noqa: PLC0415

    return penstock.initialize(model, config, **others)


def assert_fails(outcomes, kind, *words):
    """Every rank failed with this kind of error, and each text has all of the words."""
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Failure), f"rank {rank} returned {outcome!r}"
        assert outcome.is_a(kind), f"rank {rank}: {outcome.trace}"
        for word in words:
            assert word in outcome.text, f"rank {rank}: {word!r} is not in {outcome.text!r}"


# ---- configs (one process)

BAD_CONFIGS = {
    "unknown key": ({"strategi": "zero3"}, ["strategi", 'did you mean "strategy"']),
    "unknown nested key": ({"comm": {"timeout": 3}}, ["comm.timeout", 'mean "comm.timeout_s"']),
    "unknown optimizer key": ({"optimizer": {"beta": [0.9, 0.9]}}, ["optimizer.beta", "betas"]),
    "wrong type": ({"clip": "1.0"}, ['"clip"', "a number"]),
    "wrong type of a section": ({"batch": 3}, ['"batch"', "object"]),
    "out of range": ({"clip": -1.0}, ['"clip"', ">= 0"]),
    "not whole": ({"batch": {"accumulate": 1.5}}, ["batch.accumulate", "whole number"]),
    "unknown strategy": ({"strategy": "zero4"}, ["zero4", "zero3"]),
    "unknown precision": ({"precision": "bf61"}, ["bf61", "bf16"]),
    "uneven batch": ({"batch": {"micro": 3, "accumulate": 2, "global": 7}}, ["batch.global", "7"]),
    "uneven nodes": ({"mesh": {"node": 2}}, ["mesh.node"]),
    "not JSON": ("{strategy: zero3", ["JSON"]),
    "no such file": ("no_such_config.json", ["no_such_config.json"]),
    "no effect": ({"optimizer": {"type": "SGD", "eps": 1e-4}}, ["optimizer.eps", "no effect"]),
    "unknown unit class": ({"units": {"modules": ["Blok"]}}, ["Blok", "Block"]),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config(name):
    import penstock  # noqa: PLC0415

    config, words = BAD_CONFIGS[name]
    with pytest.raises(penstock.ConfigError) as caught:
        initialize(models.build("gpt"), config)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_failed_initialize_leaves_the_model_alone():
    model = models.build("gpt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError):
        initialize(model, {"strategy": "zero3", "units": {"modules": ["Blok"]}})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_unknown_override():
    with pytest.raises(ValueError, match="stratgy.*strategy"):
        initialize(models.build("gpt"), {}, stratgy="zero3")


def test_optimizer_twice():
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="optimizer"):
        initialize(model, {"optimizer": {"type": "AdamW"}}, optimizer=optimizer)


def test_optimizer_of_another_model():
    optimizer = torch.optim.AdamW(models.build("gpt").parameters())
    with pytest.raises(ValueError, match="optimizer"):
        initialize(models.build("gpt"), {}, optimizer=optimizer)


def test_model_without_parameters():
    with pytest.raises(ValueError, match="no parameters"):
        initialize(nn.Tanh(), {})


def test_integer_parameter():
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match='"table".*(Long|int64)'):
        initialize(model, {})


# ---- calls in the wrong order (one process)


@pytest.fixture
def engine():
    engine = initialize(models.build("gpt"), Case("zero3").config())
    yield engine
    engine.close()


def test_backward_without_forward(engine):
    engine.backward(torch.ones((), requires_grad=True))  # as in torch, it gives no gradient
    assert engine.step() is False


def test_step_without_backward(engine):
    with pytest.raises(RuntimeError, match="backward"):
        engine.step()


def test_second_step_without_backward(engine):
    engine.backward(engine(*models.batches("gpt", 1, 2)[0]))
    assert engine.step() is True
    with pytest.raises(RuntimeError, match="backward"):
        engine.step()


def test_use_after_close():
    engine = initialize(models.build("gpt"), Case("zero3").config())
    engine.close()
    with pytest.raises(RuntimeError, match="close"):
        engine(*models.batches("gpt", 1, 2)[0])


def test_loss_that_is_not_a_scalar(engine):
    loss = engine(*models.batches("gpt", 1, 2)[0])
    with pytest.raises(RuntimeError, match="scalar"):
        engine.backward(torch.stack([loss, loss]))


# ---- on ranks


def bad_gradient(strategy, value):
    """The third micro-step of rank 1 makes a gradient that is not finite, in step two."""
    model = models.build("gpt")
    engine = initialize(model, Case(strategy, accumulate=4).config())
    batches = models.batches("gpt", 2, 4 * 2 * training.MICRO)
    training.backwards(engine, batches[0], 4)
    engine.step()
    before = engine.state_dict()
    message = ""
    for micro in range(4):
        loss = engine(*training.rank_part(batches[1], micro))
        if dist.get_rank() == 1 and micro == 2:
            weight = model.blocks[1].down.weight
            weight.register_hook(lambda gradient: gradient.clone().fill_(value))
        engine.backward(loss)
    try:
        engine.step()
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "weights changed"
    engine.close()
    return message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@every_strategy
def test_gradient_that_is_not_finite(strategy, value, pools):
    for message in pools(2).run(bad_gradient, strategy, value):
        assert message.startswith("RuntimeFault: ")
        assert "blocks.1.down.weight" in message
        assert re.search(r"rank 1\b", message)
        assert re.search(r"micro[- ](step|batch) (2|3)\b", message)


def training_goes_on_after_nan():
    """The window with the bad gradient is dropped, the next one is as if it had never been."""
    model = models.build("gpt")
    engine = initialize(model, Case("zero2").config())
    batches = models.batches("gpt", 3, 2 * training.MICRO)
    for index in (0, 1, 1, 2):
        loss = engine(*training.rank_part(batches[index], 0))
        bad = index == 1 and not hasattr(model, "was_bad")
        if bad:
            model.was_bad = True
            loss = loss * float("nan")
        engine.backward(loss)
        if bad:
            with pytest.raises(RuntimeError, match="finite"):
                engine.step()
        else:
            engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


def test_training_goes_on_after_nan(pools):
    weights = pools(2).run(training_goes_on_after_nan)[0]
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    for batch in models.batches("gpt", 3, 2 * training.MICRO):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-5), name


def arrive_late():
    """Rank 1 stands still between making its connections and using them."""
    from penstock.front import ranks  # noqa: PLC0415

    made = ranks.Ranks.__init__

    def dawdle(self, *settings):
        made(self, *settings)
        time.sleep(10.0 if dist.get_rank() == 1 else 0.0)

    ranks.Ranks.__init__ = dawdle
    try:
        config = Case("zero3").config() | {"comm": {"timeout_s": 8}}
        initialize(models.build("gpt"), config).close()
    finally:
        ranks.Ranks.__init__ = made
    return "met"


def test_initialize_waits_for_ranks_that_arrive_late(pools):
    assert pools(2).run(arrive_late) == ["met", "met"]


def other_model(kind):
    rank = dist.get_rank()
    model = models.Gpt(blocks=3 if kind != "depth" or rank == 0 else 2)
    if kind == "shape" and rank == 1:
        model.blocks[1].up = nn.Linear(models.WIDTH, 8)
    if kind == "frozen" and rank == 1:
        model.blocks[2].proj.bias.requires_grad_(False)
    initialize(model, Case("zero3").config() | SHORT)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("depth", "blocks.2."), ("shape", "blocks.1.up.weight"), ("frozen", "blocks.2.proj.bias")],
)
def test_ranks_with_different_models(kind, name, pools):
    outcomes = pools(2).attempt(other_model, kind)
    assert_fails(outcomes, "RuntimeFault", name, "rank 0", "rank 1")


def own_folders(folders):
    """Folders are a machine's own: the ranks need not agree on them."""
    folder = folders[dist.get_rank()]
    config = Case("zero3").config() | {
        "offload": {"optimizer": "disk", "path": folder},
        "comm": {**SHORT["comm"], "report_dir": folder},
    }
    model = models.build("gpt")
    engine = initialize(model, config)
    for batch in models.batches("gpt", 2, 2 * training.MICRO):
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


def test_ranks_may_have_folders_of_their_own(pools, tmp_path):
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        pathlib.Path(folder).mkdir()
    weights = pools(2).run(own_folders, folders)[0]
    same = pools(2).run(own_folders, [str(tmp_path)] * 2)[0]
    assert all(torch.equal(weights[name], same[name]) for name in same)


def lose_a_peer(folder):
    comm = {"timeout_s": 12, "report_dir": folder}
    engine = initialize(models.build("gpt"), Case("zero3").config() | {"comm": comm})
    batches = models.batches("gpt", 2, 2 * training.MICRO)
    engine.backward(engine(*training.rank_part(batches[0], 0)))
    engine.step()
    if dist.get_rank() == 1:
        engine.close(gather=False)
        return ""
    with pytest.raises(RuntimeError) as caught:
        engine(*training.rank_part(batches[1], 0))
    engine.close(gather=False)
    return str(caught.value)


def test_a_lost_peer_leaves_a_report_of_the_plans_last_lines(pools, tmp_path):
    text = pools(2).run(lose_a_peer, str(tmp_path))[0]
    pattern = (
        r"; the plan's last lines on rank 0: (`.*`); the report is in (\S+); the last steps are in"
    )
    found = re.search(pattern + r" (\S+)$", text)
    assert found and found[1].count("`") == 10, text
    lines = pathlib.Path(found[2]).read_text().splitlines()
    assert lines[0] == text[: found.start()]
    assert any(re.match(r"step 1, [\d.e-]+ s before: update u1 ", line) for line in lines)
    assert f"`{lines[-1].partition(' before: ')[2]}`" in found[1]
    events = json.loads(pathlib.Path(found[3]).read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert any(event["name"].startswith("update u1 ") for event in slices)
    failed = [event for event in slices if event["cat"] == "exchange"][-1]
    assert failed["name"].startswith("move u0+u1+u2+u3 param") and failed["args"]["step"] == 2


def other_config(key, values):
    rank = dist.get_rank()
    initialize(models.build("gpt"), Case("zero3").config() | SHORT | {key: values[rank]})


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("strategy", ["zero3", "zero3", "zero2"], ["zero3", "zero2"]),
        ("clip", [1.0, 2.5, 1.0], ["1.0", "2.5"]),
        ("optimizer", [{"lr": 1e-3}, {"lr": 1e-3}, {"lr": 0.25}], ["0.25", "0.001"]),
    ],
)
def test_ranks_with_different_configs(key, values, shown, pools):
    outcomes = pools(3).attempt(other_config, key, values)
    assert_fails(outcomes, "RuntimeFault", key, *shown)


def read_freed(way):
    model = models.build("gpt")
    engine = initialize(model, Case("zero3").config())
    for batch in models.batches("gpt", 2, 2 * training.MICRO):
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()
    weight = model.blocks[1].up.weight
    assert weight.shape == (4 * models.WIDTH, models.WIDTH) and weight.t().shape[0] == models.WIDTH
    try:
        if way == "sum":
            weight.sum()
        elif way == "print":
            str(weight)
        else:
            weight.data.add_(1)
    except Exception as error:  # the kind is torch's
        return str(error)
    finally:
        engine.close()
    return "no error"


@pytest.mark.parametrize("way", ["sum", "print", "write"])
def test_read_of_a_freed_parameter_names_it(way, pools):
    for text in pools(2).run(read_freed, way):
        assert "blocks.1.up.weight" in text
        assert "gathered" in text


class SparseGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, index):
        return self.out(self.table(index)).mean()


@every_strategy
def test_sparse_gradient(strategy):
    engine = initialize(SparseGradient(), {"strategy": strategy})
    loss = engine(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match='"table.weight".*sparse'):
        engine.backward(loss)
    engine.close()


class Stumbles(models.Gpt):
    """Fails where it is told to, on all ranks."""

    where = ""

    def forward(self, tokens, targets):
        loss = super().forward(tokens, targets)
        if self.where == "forward":
            raise ValueError("stumbled in forward")
        if self.where == "backward":
            loss.register_hook(self.fail)
        return loss

    def fail(self, _):
        raise ValueError("stumbled in backward")


def stumble(strategy, where):
    """An error of the user's is passed on as it is, and training can go on after it."""
    torch.manual_seed(3)
    model = Stumbles()
    engine = initialize(model, Case(strategy).config())
    for index, batch in enumerate(models.batches("gpt", 5, 2 * training.MICRO)):
        model.where = where if index in (0, 2) else ""
        if model.where:
            with pytest.raises(ValueError, match=f"stumbled in {where}"):
                engine.backward(engine(*training.rank_part(batch, 0)))
        else:
            engine.backward(engine(*training.rank_part(batch, 0)))
            engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("where", ["forward", "backward"])
@every_strategy
def test_error_in_the_model_on_all_ranks(strategy, where, pools):
    weights = pools(2).run(stumble, strategy, where)[0]
    torch.manual_seed(3)
    model = models.Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    for index, batch in enumerate(models.batches("gpt", 5, 2 * training.MICRO)):
        if index not in (0, 2):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-5), name


def test_steps_that_are_not_finite_may_be_skipped():
    config = {"strategy": "zero2", "nonfinite": "skip", "precision": "bf16"}
    engine = initialize(torch.nn.Linear(4, 4), config)
    before = engine.state_dict()["weight"]
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum() * float("inf"))
    assert engine.step() is False
    assert engine.skipped_steps == 1 and "weight" in engine.overflow
    assert torch.equal(engine.state_dict()["weight"], before)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    assert engine.step() is True and engine.steps == 1
    engine.close()
