"""Residuals of lossy wires: nothing that an encoding rounds away is lost, whatever the strategy,
the window, the checkpoint or the number of ranks."""

from __future__ import annotations

import random
from typing import Any

import compare
import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from training import Case

WIDTH = 1024
WIRES = ("int4/128/nearest", "int4/64", "int8/128/nearest", "int8/32", "sign/128", "sign/32")
# The strategy, the mesh of four ranks, the layout of the residual, and where gradients add up.
PLACES: dict[str, tuple[str, dict[str, int], str, str]] = {
    "zero1": ("zero1", {}, "PP", ""),
    "zero2": ("zero2", {}, "PP", ""),
    "zero3": ("zero3", {}, "PP", ""),
    "nodes": ("zero3", {"node": 2}, "PS", ""),
    "hpz": ("hpz", {"node": 2}, "PS", ""),
    "inside": ("zero3", {"node": 2}, "PP", ""),
    "held": ("zero3", {"node": 2}, "PS", "PP@host:fp32"),
    "between": ("zero2", {"node": 2}, "PS", "PS@device:fp32"),
    "inside first": ("zero2", {"node": 2}, "PP", "PS@device:fp32"),
}


class Sums(nn.Module):
    """The gradient of a weight is the input; the second weight is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3 * WIDTH))
        self.second = nn.Parameter(torch.zeros(40, 20))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out = (self.first * x[: 3 * WIDTH]).sum()
        return out + (self.second.flatten() * x[3 * WIDTH :]).sum() if both else out


NUMEL = 3 * WIDTH + 800


def settings_of(place: str, wire: str, **more: Any) -> dict[str, Any]:
    strategy, mesh, layout, hold = PLACES[place]
    tier, dtype = more.pop("tier", "device"), more.pop("dtype", "fp32")
    if mesh:
        wire = f"{'local' if place.startswith('inside') else 'node'}:{wire}"
    table: dict[str, Any] = {
        "wire": {"grad": wire},
        "residual": {"rest": f"{layout}@{tier}:{dtype}"},
    }
    if hold:
        table["grad"] = {"hold": hold}
    return {
        "strategy": strategy,
        "mesh": mesh,
        "optimizer": {"type": "SGD", "lr": 0.0},
        "comm": {"timeout_s": 60},
        "table": table,
    } | more


def addends_of(seed: int, micro: int, rank: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 * seed + 10 * micro + rank)
    rows = torch.randn(NUMEL, generator=numbers)
    return rows * torch.exp2(torch.arange(NUMEL) // 100 % 7)


def engine_of(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(Sums(), settings)


def residual_of(engine: Any) -> torch.Tensor:
    return torch.cat(
        [engine.param_state(one, "residual").flatten() for one in engine.module.parameters()]
    )


def gradient_of(engine: Any) -> torch.Tensor:
    found = engine.full_grads()
    size = {"first": 3 * WIDTH, "second": 800}
    return torch.cat([found.get(name, torch.zeros(size[name])).flatten() for name in size])


def window(
    engine: Any, step: int, uneven: bool = False, micros: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backwards of one window. Returns the gradient that arrives, and the exact one.

    `uneven`: ranks leave out the second weight in different steps. `micros`: of a window that ends
    early; its gradient cannot be read before that.
    """
    ranks, whole = dist.get_world_size(), engine.config.batch.accumulate
    micros = micros or whole
    exact = torch.zeros(NUMEL)
    for micro in range(micros):
        for rank in range(ranks):
            both = (step + micro + uneven * rank) % 3 != 1
            one = addends_of(step, micro, rank) / (ranks * micros)
            exact += one if both else one * (torch.arange(NUMEL) < 3 * WIDTH)
            if rank == dist.get_rank():
                engine.backward(engine(addends_of(step, micro, rank), both))
        if micro + 1 < micros:
            engine.step()
    return (gradient_of(engine) if micros == whole else torch.zeros(NUMEL)), exact


def close(found: torch.Tensor, wanted: torch.Tensor, *others: torch.Tensor) -> None:
    """To the rounding of a few operations in fp32 with addends of at most about 4 * 2**6, and with
    these other values."""
    size = max(2.0**8, *(float(one.abs().max()) for one in others), 0.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=8 * size * 2**-24)


def conserved(settings: dict[str, Any], steps: int, uneven: bool = False) -> list[torch.Tensor]:
    """Checks each step; returns the residuals after each step."""
    engine = engine_of(settings)
    residuals = [torch.zeros(NUMEL)]
    for step in range(steps):
        arrived, exact = window(engine, step, uneven)
        assert torch.equal(residual_of(engine), residuals[-1])  # until an update follows
        engine.step()
        residuals.append(residual_of(engine))
        close(arrived + residuals[-1] - residuals[-2], exact, *residuals[-2:])
    engine.close()
    return residuals


def drawn(draw: int) -> tuple[int, dict[str, Any]]:
    numbers = random.Random(draw)
    place = numbers.choice(list(PLACES))
    world = 4 if PLACES[place][1] else numbers.choice([2, 3, 4])
    more: dict[str, Any] = {"batch": {"accumulate": numbers.choice([1, 1, 2, 3])}}
    more["tier"] = numbers.choice(["device", "host"])
    if numbers.random() < 0.3:
        more["offload"] = {"optimizer": "host"}
    if numbers.random() < 0.3:
        more["comm"] = {"timeout_s": 60, "exact_every": 3}
    wire = "fp8/128" if draw % 10 == 9 else numbers.choice(WIRES)
    return world, settings_of(place, wire, **more)


@pytest.mark.parametrize("draw", range(300))
def test_nothing_is_lost(draw, pools):
    world, settings = drawn(draw)
    uneven = draw % 2 == 1
    found = pools(world).run(conserved, settings, 5, uneven)
    for residuals in found:
        for step, one in enumerate(residuals):
            assert torch.equal(one, found[0][step])
            exact = step > 0 and settings["comm"].get("exact_every") and step % 3 == 0
            if not (uneven and exact):
                assert bool(one.any()) == (step > 0 and not exact), step


def closed_early(settings: dict[str, Any]) -> None:
    """Adds up what weights of SGD with a rate of 1 got."""
    engine = engine_of(settings)
    total = torch.zeros(NUMEL)
    for step, micros in enumerate([0, 2, 1, 0, 3]):
        total += window(engine, step, micros=micros)[1]
        engine.step(force=micros > 0)
    state = engine.state_dict(rank0_only=False)
    moved = -torch.cat([state[name].flatten() for name in ("first", "second")])
    close(moved + residual_of(engine), total, 4 * total, residual_of(engine))


@pytest.mark.parametrize("wire", ["int4/128/nearest", "sign/64"])
@pytest.mark.parametrize("place", ["zero1", "zero3", "nodes"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_window_that_is_closed_early_loses_nothing(exact, place, wire, pools):
    settings = settings_of(place, wire, batch={"accumulate": 4})
    settings["optimizer"] = {"type": "SGD", "lr": 1.0}
    if exact:
        settings["comm"]["exact_every"] = 2
    pools(4 if PLACES[place][1] else 2).run(closed_early, settings)


def test_a_bf16_residual_loses_its_own_rounding_alone(pools):
    settings = settings_of("zero1", "int4/128/nearest", dtype="bf16")
    with pytest.raises(AssertionError):
        pools(2).run(conserved, settings, 3)
    (found,) = {tuple(x) for x in pools(2).run(bf16_errors, settings)}
    assert all(0 < one < 2**-8 for one in found)


def bf16_errors(settings: dict[str, Any]) -> list[float]:
    """Relative to the largest residual."""
    engine = engine_of(settings)
    errors, before = [], torch.zeros(NUMEL)
    for step in range(3):
        arrived, exact = window(engine, step)
        engine.step()
        after = residual_of(engine)
        errors.append(float((arrived + after - before - exact).abs().max() / after.abs().max()))
        before = after
    return errors


# ---- windows that end without an update


def dropped(settings: dict[str, Any], how: str) -> Any:
    engine = engine_of(settings)
    for step in range(2):
        window(engine, step)
        engine.step()
    before = residual_of(engine)
    if how == "zero_grad":
        window(engine, 7)
        engine.zero_grad()
    else:
        x = addends_of(8, 0, dist.get_rank())
        x[5] = float("nan") if dist.get_rank() == 0 else 0.0
        engine.backward(engine(x, True))
        engine.step()
    after = residual_of(engine)
    arrived, exact = window(engine, 2)
    engine.step()
    close(arrived + residual_of(engine) - after, exact)
    return bool(before.any()), torch.equal(before, after), engine.steps


@pytest.mark.parametrize("place", ["zero1", "zero3"])
@pytest.mark.parametrize("how", ["zero_grad", "skip"])
def test_a_dropped_window_leaves_the_residual(how, place, pools):
    settings = settings_of(place, "int4/128/nearest", nonfinite="skip")
    for found in pools(2).run(dropped, settings, how):
        assert found == (True, True, 3)


# ---- checkpoints


def saved(settings: dict[str, Any], path: str) -> torch.Tensor:
    engine = engine_of(settings)
    for step in range(2):
        window(engine, step)
        engine.step()
    engine.save(path)
    return residual_of(engine)


def loaded(settings: dict[str, Any], path: str) -> torch.Tensor:
    """Returns the residual, from which the next step goes on without loss."""
    engine = engine_of(settings)
    window(engine, 5)
    engine.step()  # leaves another residual, which the load replaces
    engine.load(path)
    before = residual_of(engine)
    arrived, exact = window(engine, 2)
    engine.step()
    close(arrived + residual_of(engine) - before, exact)
    return before


LOADS = {
    "same": (2, settings_of("zero1", "int4/128/nearest")),
    "three": (3, settings_of("zero1", "int4/128/nearest")),
    "four": (4, settings_of("zero3", "int8/32", tier="host")),
    "nodes": (4, settings_of("hpz", "int4/64")),
    "window": (2, settings_of("zero2", "int4/64", batch={"accumulate": 4})),
}


@pytest.mark.parametrize("case", LOADS)
def test_a_checkpoint_keeps_what_was_rounded_away(case, pools, tmp_path):
    first = settings_of("zero2", "int4/128/nearest", batch={"accumulate": 2})
    wanted = pools(2).run(saved, first, str(tmp_path))[0]
    world, settings = LOADS[case]
    for found in pools(world).run(loaded, settings, str(tmp_path)):
        close(found, wanted)


def loaded_without(settings: dict[str, Any], path: str) -> str:
    import contextlib  # noqa: PLC0415
    import os  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    engine = engine_of(settings)
    with tempfile.TemporaryFile("w+") as file, contextlib.ExitStack() as stack:
        kept = os.dup(2)
        stack.callback(os.dup2, kept, 2)
        os.dup2(file.fileno(), 2)
        engine.load(path)
        file.seek(0)
        return file.read()


def test_a_run_without_residuals_says_that_it_loses_them(pools, tmp_path):
    pools(2).run(saved, settings_of("zero2", "int4"), str(tmp_path))
    plain = settings_of("zero2", "int4") | {"table": {}}
    first, second = pools(2).run(loaded_without, plain, str(tmp_path))
    assert "has residuals" in first and "no table.residual.rest" in first
    assert "residual" not in second


# ---- training


TRAININGS = [
    Case("zero1", accumulate=2),
    Case("zero2", "bf16", world=4),
    Case("zero3", accumulate=3),
    Case("zero3", "bf16", world=4, recompute="nonreentrant"),
    Case("zero3", clip=True, world=3),
    Case("zero3", world=4, model="parts", tensor=2),
    Case("zero1", world=4, model="parts", tensor=2),
    *(Case(strategy, model=name) for name in zoo.EVERYWHERE for strategy in ("zero1", "zero3")),
]


@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_int4_trains_like_plain_torch(case, pools):
    """Twice the same bits, and ranks with equal weights."""
    table = {
        "wire": {"grad": "int4/64/nearest"},
        "residual": {"rest": f"PP@device:{case.precision}"},
    }
    compare.lossy_runs(case, pools, {"table": table}, limit=0.05)


def second_moments(settings: dict[str, Any], path: str, first: int) -> Any:
    """For each step, whether it changed the second moment, and the weights after it."""
    engine = engine_of(settings)
    if first > 0:
        engine.load(f"{path}/{first}")
    weight = engine.module.first
    changed, weights = [], []
    before = engine.param_state(weight, "exp_avg_sq")
    for step in range(first, 8):
        window(engine, step)
        engine.step()
        after = engine.param_state(weight, "exp_avg_sq")
        changed.append(float((after != before).float().mean()))
        weights.append(engine.state_dict(rank0_only=False)["first"])
        before = after
        if first == 0 and step in (1, 4, 5):
            engine.save(f"{path}/{step + 1}")
    return changed, weights


@pytest.mark.parametrize("place", ["zero1", "zero3", "hpz"])
def test_signs_leave_second_moments_alone(place, pools, tmp_path):
    """Also after a load; after an exact step the weights have the same bits."""
    settings = settings_of(place, "sign/64", optimizer={"type": "AdamW", "lr": 1e-2})
    settings["comm"] = {"timeout_s": 60, "exact_first": 2, "exact_every": 6}
    pool, path = pools(4 if place == "hpz" else 2), str(tmp_path)
    changed, weights = pool.run(second_moments, settings, path, 0)[0]
    exact = [step in (0, 1, 5) for step in range(8)]
    for share, updated in zip(changed, exact, strict=True):  # the others only keep a bound
        assert share > 0.9 if updated else share < 0.1
    for first in (2, 5, 6):
        same, again = pool.run(second_moments, settings, path, first)[0]
        if exact[first - 1]:
            assert same == changed[first:]
        for one, two in zip(again, weights[first:], strict=True):
            if exact[first - 1]:
                assert torch.equal(one, two)
            else:
                torch.testing.assert_close(one, two, rtol=0, atol=4e-2)


class Rows(nn.Module):
    """An embedding of odd rows, most of which no token has in the exact steps, and LoRA's zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(50, 33)
        self.down = nn.Parameter(torch.randn(33, 4))
        self.up = nn.Parameter(torch.zeros(4, 33))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens)
        return (x + x @ self.down @ self.up - 1.0).square().mean()


def moved_rows(settings: dict[str, Any]) -> tuple[float, list[float]]:
    """The largest change of a weight, and the losses."""
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(Rows(), settings)
    before = {name: value.clone() for name, value in engine.state_dict(rank0_only=False).items()}
    losses = []
    for step in range(40):
        draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
        tokens = torch.randint(0, 50 if step >= 8 else 5, (64,), generator=draw)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    after = engine.state_dict(rank0_only=False)
    return max(float((after[name] - before[name]).abs().max()) for name in before), losses


@pytest.mark.parametrize("place", ["zero1", "zero3", "hpz"])
def test_weights_without_an_exact_gradient_do_not_explode(place, pools):
    settings = settings_of(place, "sign", optimizer={"type": "AdamW", "lr": 1e-2})
    settings |= {"comm": {"timeout_s": 60, "codec": "1bit", "exact_first": 8}, "table": {}}
    for change, losses in pools(4 if place == "hpz" else 2).run(moved_rows, settings):
        assert change < 40 * 1e-2 * 3
        assert losses[-1] < 0.9 * losses[0]


def late_moment(settings: dict[str, Any]) -> bool:
    """`second` gets its first gradient after the exact steps."""
    engine = engine_of(settings)
    for step in range(4):
        x = addends_of(step, 0, dist.get_rank())
        engine.backward(engine(x, both=step > 2))
        engine.step()
    size = engine.param_state(engine.module.second, "exp_avg_sq").abs().min()
    moved = engine.state_dict(rank0_only=False)["second"].abs().max()
    return float(size) > 0 and 0 < float(moved) < 0.02


def test_a_parameter_that_comes_late_has_a_second_moment(pools):
    settings = settings_of("zero2", "sign", optimizer={"type": "AdamW", "lr": 1e-2})
    settings["comm"] = {"timeout_s": 60, "exact_first": 1}
    assert pools(2).run(late_moment, settings) == [True, True]


CODECS = {
    "zero++": {"codec": "zero++"},
    "1bit": {"codec": "1bit", "exact_first": 2},
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "case",
    [
        Case("zero1", accumulate=2),
        Case("zero2", "bf16", world=4),
        Case("zero3", "bf16"),
        Case("hpz", world=4),
        Case("zero3", world=4, model="parts", tensor=2),
    ],
    ids=str,
)
def test_codecs_train_like_plain_torch(case, codec, pools):
    comm = case.config()["comm"] | CODECS[codec]
    compare.lossy_runs(case, pools, {"comm": comm}, limit=0.1)


# ---- memory, bits and refusals


def measured(settings: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    engine = engine_of(settings)
    arrived = []
    for step in range(4):
        arrived.append(window(engine, step)[0])
        engine.step()
    return engine.ledger(), arrived


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_ledger_has_residuals(place, accumulate, pools):
    settings = settings_of(place, "int4/64", batch={"accumulate": accumulate})
    world = 4 if PLACES[place][1] else 2
    first, again = (pools(world).run(measured, settings) for _ in range(2))
    for (ledger, arrived), (_, other) in zip(first, again, strict=True):
        predicted = ledger["predicted"][settings["strategy"]]
        assert ledger["measured"]["total"] == pytest.approx(predicted["total"], rel=0.05)
        assert predicted["grad"] >= 4 * NUMEL // (2 if settings["mesh"] else 1)
        for one, two, three in zip(arrived, other, first[0][1], strict=True):
            assert torch.equal(one, two) and torch.equal(one, three)


def refusal(settings: dict[str, Any]) -> str:
    try:
        engine_of(settings)
    except Exception as error:  # noqa: BLE001 - its text is the result
        return str(error)
    return ""


def with_residual(rest: str, strategy: str = "zero2", **more: Any) -> dict[str, Any]:
    made = settings_of("zero2", "int4") | more
    made["strategy"] = strategy
    made["table"] = {"wire": {"grad": "int4"}, "residual": {"rest": rest}} | more.get("table", {})
    return made


REFUSED = {
    "layout": (with_residual("SS@device:fp32"), 'it can only be "PP@device:fp32"'),
    "disk": (with_residual("PP@disk:fp32"), "the tier can be device or host"),
    "fp16": (with_residual("PP@device:fp16"), "Train in bf16 or fp32"),
    "ddp": (with_residual("PP@device:fp32", "ddp"), "rounded twice on their way"),
    "plain": (
        with_residual("PP@device:fp32", table={"wire": {}}),
        "no sum of gradients rounds anything",
    ),
    "trains": (
        with_residual("PP@device:fp32", precision="fp16"),
        "have a loss scale, but a residual",
    ),
}


@pytest.mark.parametrize(("settings", "text"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_cell(settings, text, pools):
    for found in pools(2).run(refusal, settings):
        assert 'table.residual.rest is "' in found and ": residual: " in found
        assert text in found


def test_one_rank_rounds_nothing(pools):
    settings = settings_of("zero1", "int4/128/nearest")
    (residuals,) = pools(1).run(conserved, settings, 2)
    assert not any(one.any() for one in residuals)
