"""The table of idioms (idioms/): each row on an engine and on plain torch in one process.

`pytest tests/parity/test_idioms.py --full` runs each row at every strategy, precision and tier;
every day it is one cell.
"""

from __future__ import annotations

import re
from typing import Any

import idioms
import pytest
import torch
from idioms import trial
from idioms.table import Cell, Idiom, Outcome
from ranks import Failure, RankError

IDIOMS = idioms.every()
TIMEOUT = 90  # s; a collective that waits for a peer ends by itself after 20
# Of an error that is meant for a user; autograd passes on the text of one, and not its class.
OURS = ("ConfigError", "RuntimeFault")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LAYER = re.compile(r"\[[a-z]+::\w+\]")


def on_rank(name: str, cell: Cell, folder: str) -> dict[str, Any]:
    return trial.run(IDIOMS[name], cell, plain=False, folder=folder)


def on_plain(idiom: Idiom, cell: Cell) -> dict[str, Any] | Exception:
    try:
        return trial.run(idiom, cell, plain=True)
    except Exception as error:  # noqa: BLE001 - it may be what the row is about
        return error


# ---- comparison

Flat = dict[str, torch.Tensor]


def flat(value: Any, path: str = "") -> Flat:
    """Nested dicts and lists of tensors, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: t for key, one in items for name, t in flat(one, f"{path}/{key}").items()}


def mean(outcomes: list[dict[str, Any]], key: str) -> Flat:
    """Over the ranks."""
    ranks = [flat(trial.values(one[key])) for one in outcomes]
    assert all(one.keys() == ranks[0].keys() for one in ranks), f"silent: {key} by rank: {ranks}"
    return {name: sum(one[name] for one in ranks) / len(ranks) for name in ranks[0]}


def far(ours: torch.Tensor, theirs: torch.Tensor, went: float, low: bool) -> str:
    """By how much they differ, if it is more than they may; `went`: how far training took them."""
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    ours, theirs = ours.double(), theirs.double()
    limit = 2e-5 * theirs.abs().clamp(min=1.0)
    if low:
        limit += 2**-7 * theirs.abs() + 0.06 * went
    apart = (ours - theirs).abs()
    apart[ours == theirs] = 0.0  # infinite
    apart[ours.isnan() & theirs.isnan()] = 0.0
    worst = float((apart / limit).nan_to_num(torch.inf).max()) if apart.numel() else 0.0
    return "" if worst <= 1 else f"{float(apart.max()):.3g} apart, {worst:.3g} times the limit"


def check_same(what: str, ours: Flat, theirs: Flat, low: bool, start: Flat | None = None) -> None:
    assert ours.keys() == theirs.keys(), f"silent: {what}: {sorted(ours.keys() ^ theirs.keys())}"
    wrong = {}
    for name, value in theirs.items():
        went = float(value.abs().max()) if value.numel() else 0.0
        if start is not None and name in start and value.numel():
            went = float((value - start[name]).abs().max())
        report = far(ours[name], value, went, low)
        if report:
            wrong[name] = report
    assert not wrong, f"silent: {what}: {wrong}"


def check_as_torch(low: bool, ours: list[Any], plain: Any) -> None:
    for rank, one in enumerate(ours):
        assert not isinstance(one, Failure), f"refused: rank {rank}: {one.text}\n{one.trace}"
    assert not isinstance(plain, Exception), f"the row does not run on torch: {plain!r}"
    start = flat(plain["start"])
    for one in ours[1:]:
        mine, first = flat(one["left"]), flat(ours[0]["left"])
        other = [name for name in first if not torch.equal(first[name], mine[name])]
        assert not other, f"silent: ranks have other weights after close(): {other}"
    check_same("losses", mean(ours, "losses"), flat(trial.values(plain["losses"])), low)
    check_same("numbers", mean(ours, "numbers"), flat(plain["numbers"]), low)
    for key in ("weights", "left"):
        check_same(
            key, flat(trial.values(ours[0][key])), flat(trial.values(plain[key])), low, start
        )


# ---- errors


def check_refused(outcome: Outcome, ours: list[Any], kinds: tuple[str, ...]) -> None:
    """Every rank ended with an error that a user can read."""
    for rank, one in enumerate(ours):
        assert isinstance(one, Failure), f"went on: rank {rank} of {len(ours)}"
        ours_passed_on = one.kind in kinds and (outcome.words or LAYER.search(one.text))
        clear = one.is_a(*OURS) or outcome.kind == "raises" or ours_passed_on
        assert clear, f"unclear error: rank {rank}: {one.kind}: {one.text}\n{one.trace}"
        for word in outcome.words:
            assert word in one.text, f"unclear error: {word!r} is not in {one.text!r}\n{one.trace}"


def check(idiom: Idiom, cell: Cell, ours: list[Any], plain: Any) -> None:
    outcome = idiom.outcome(cell)
    kinds: tuple[str, ...] = ("builtins.RuntimeError",)
    failed = any(isinstance(one, Failure) for one in ours)
    if isinstance(plain, Exception) and TORCH < outcome.since:
        assert failed == all(isinstance(one, Failure) for one in ours), "some ranks went on"
    elif outcome.kind == "raises":
        assert isinstance(plain, Exception), "torch raises nothing"
        check_refused(outcome, ours, kinds)
    elif outcome.kind == "refused" or (outcome.kind != "as torch" and failed):
        # In bf16 plain torch has no masters where the body steps by itself.
        runs = not isinstance(plain, Exception) or cell.precision == "bf16"
        assert runs, f"the row does not run on torch: {plain!r}"
        check_refused(outcome, ours, kinds)
    else:
        check_as_torch(idiom.rough or cell.precision == "bf16", ours, plain)


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")


def pytest_generate_tests(metafunc: Any) -> None:
    full = metafunc.config.getoption("--full")
    cases = [
        pytest.param(name, cell, id=f"{slug(name)}-{cell}")
        for name, idiom in IDIOMS.items()
        for cell in (idiom.cells() if full else idiom.sample())
    ]
    metafunc.parametrize(("name", "cell"), cases)


def test_idiom(name, cell, pools, tmp_path):
    idiom = IDIOMS[name]
    plain = on_plain(idiom, cell)
    try:
        ours = pools(cell.world).attempt(on_rank, name, cell, str(tmp_path), timeout=TIMEOUT)
    except RankError as error:
        raise AssertionError(f"hang or crash: {error}") from None
    check(idiom, cell, ours, plain)
