"""How inference() and weights() end: after an error on one rank, early, or with changes between."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import test_inference as inference
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(480)


def trains(engine: Any) -> bool:
    """Whether a step of training works."""
    for part in range(2):
        inference.micro(engine, "llama", part)
    return bool(engine.step())


# ---- one rank raises an error inside inference()


def one_raises(place: str, mode: str, path: str, kind: str) -> tuple[str, bool]:
    """What each rank's context raised, and whether a step works afterwards."""
    engine = inference.start("llama", place, path)
    said = ""
    try:
        with engine.inference(mode):
            inference.text(engine.module, inference.prompts(), 2)
            if dist.get_rank() == 0:
                raise KeyError("row 7") if kind == "error" else KeyboardInterrupt
            inference.text(engine.module, inference.prompts(), 2 if mode == "resident" else 0)
    except (RuntimeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        return "KeyboardInterrupt", True
    try:
        return said, trains(engine) if kind == "error" else True
    finally:
        engine.close(gather=kind == "error")


@pytest.mark.parametrize("place", ["ddp", "zero3", "disk", "hpz", "zero3 of 4"])
def test_an_error_on_one_rank(place, pools, tmp_path):
    world = inference.PLACES[place][0]
    told = pools(world).run(one_raises, place, "resident", str(tmp_path), "error")
    assert told[0] == ("KeyError: 'row 7'", True)
    for said, goes_on in told[1:]:
        if place != "ddp":  # there ranks have nothing to exchange
            assert "rank 0: inference() was left with KeyError: 'row 7'" in said
        assert goes_on


def nested(kind: str) -> list[str]:
    """Two engines, one context in the other, and an error on rank 0."""
    first, second = (inference.start("llama", "zero3", "") for _ in range(2))
    said = ""
    try:
        with first.inference("resident"), second.inference("resident"):
            inference.text(second.module, inference.prompts(), 2)
            if dist.get_rank() == 0:
                raise KeyError("row 7") if kind == "error" else RuntimeError("of rank 0 alone")
    except (RuntimeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
    worked = [trains(first), trains(second)]
    first.close()
    second.close()
    return [said, *(str(one) for one in worked)]


@pytest.mark.parametrize("kind", ["error", "fault"])
def test_contexts_of_two_engines(kind, pools):
    (ours, *worked), (theirs, *worked_too) = pools(2).run(nested, kind)
    assert ours.startswith("KeyError" if kind == "error" else "RuntimeError: of rank 0")
    assert "rank 0: inference() was left with" in theirs
    assert worked == worked_too == ["True", "True"]


def test_a_rank_that_does_not_wait(pools):
    """After Ctrl-C a rank waits for nobody. The others learn the cause when they wait for it."""
    pool = pools(2)
    told = pool.run(one_raises, "zero3", "resident", "", "interrupt")
    assert told[0][0] == "KeyboardInterrupt"
    assert re.search("rank 0 (left inference|has ended|is gone|closed)", told[1][0]), told[1][0]
    pool.kill()


def one_of_two_tensor_ranks() -> str:
    engine = inference.start("llama", "T2", "")
    said = ""
    try:
        with engine.inference("resident"):
            inference.text(engine.module, inference.prompts(), 2)
            if dist.get_rank() == 0:
                raise KeyError("row 7")
            inference.text(engine.module, inference.prompts(), 2)
    except (RuntimeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
    engine.close(gather=False)
    return said


def test_ranks_that_compute_together(pools):
    pool = pools(2)
    told = pool.run(one_of_two_tensor_ranks, timeout=100)
    assert told[0] == "KeyError: 'row 7'"
    assert "row 7" in told[1] or "rank 0" in told[1], told[1]
    pool.kill()


# ---- changes between two values of weights()


def _step(engine: Any) -> None:
    engine.step()


def _write(engine: Any) -> None:
    with engine.gathered(write=True):
        pass


def _load_weights(engine: Any) -> None:
    engine.load_state_dict(engine.whole)


def _set(engine: Any) -> None:
    param = engine.module.lm_head.weight
    engine.set_param_state(param, "param", torch.zeros(param.shape))


def _load(engine: Any) -> None:
    engine.load(engine.saved)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "step": (_step, "step"),
    "write": (_write, "gathered"),
    "load_state_dict": (_load_weights, "gathered"),
    "set_param_state": (_set, "state"),
    "load": (_load, "load"),
}


def changed_between(place: str, change: str, path: str) -> tuple[str, bool, bool]:
    engine = inference.start("llama", place, path)
    vars(engine)["whole"] = engine.state_dict(rank0_only=False)
    vars(engine)["saved"] = engine.save(f"{path}/saved") if change == "load" else ""
    for part in range(2):
        inference.micro(engine, "llama", part)
    given: dict[str, torch.Tensor] = {}
    said = ""
    for number, (name, value) in enumerate(engine.weights(bucket_bytes=1)):
        given[name] = value
        if number == 3:
            try:
                CHANGES[change][0](engine)
            except (RuntimeError, ValueError) as error:
                said = str(error)
    same = all(torch.equal(value, vars(engine)["whole"][name]) for name, value in given.items())
    if change != "load":
        CHANGES[change][0](engine)
    else:
        engine.zero_grad()
    works = trains(engine)
    engine.close()
    return said, same, works


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["zero3 alone", "ddp", "zero3", "disk alone"])
def test_weights_of_one_version(place, change, pools, tmp_path):
    world = inference.PLACES[place][0]
    for said, same, works in pools(world).run(changed_between, place, change, str(tmp_path)):
        assert "while weights() was not read to its end" in said, said
        assert f"[engine::{CHANGES[change][1]}]" in said
        assert same and works


def ends_early(place: str) -> list[bool]:
    """An iterator that is left early, or kept."""
    engine = inference.start("llama", place, "")
    for _ in engine.weights():
        break
    told = [trains(engine)]
    kept = engine.weights()
    told.append(trains(engine))  # it has not begun
    next(kept)
    for part in range(2):
        inference.micro(engine, "llama", part)
    try:
        engine.step()
        told.append(False)
    except RuntimeError:
        told.append(True)
    kept.close()
    told.append(engine.step())
    engine.close()
    return told


@pytest.mark.parametrize("place", ["zero3 alone", "zero3", "ddp"])
def test_iterators_that_end_early(place, pools):
    for told in pools(inference.PLACES[place][0]).run(ends_early, place):
        assert told == [True] * 4


def one_breaks() -> str:
    engine = inference.start("llama", "zero3", "")
    try:
        for _ in engine.weights(bucket_bytes=1):
            if dist.get_rank() == 0:
                break
        trains(engine)
        said = ""
    except RuntimeError as error:
        said = str(error)
    engine.close(gather=False)
    return said


def test_one_rank_ends_early(pools):
    pool = pools(2)
    for said in pool.run(one_breaks, timeout=100):
        assert "with weights()" in said, said
    pool.kill()


def raw(call: str) -> str:
    engine = inference.start("llama", "zero3", "")
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: engine.weights("bf16"),
        "text": lambda: engine.weights(bucket_bytes="1MiB"),
        "flag": lambda: engine.weights(bucket_bytes=True),
    }
    try:
        calls[call]()
        return ""
    except ValueError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("dtype", "dtype is 'bf16'. Pass a floating dtype"),
        ("text", "bucket_bytes is '1MiB'. Pass a number"),
        ("flag", "bucket_bytes is True. Pass a number"),
    ],
)
def test_wrong_arguments(call, expected, pools):
    for said in pools(1).run(raw, call):
        assert expected in said
