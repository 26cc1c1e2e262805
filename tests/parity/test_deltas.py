"""Parameters published by deltas: what arrives is what the documented code gives, no change is
lost, and edits, loads and exact steps publish the values themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from test_wires import batch, coded, config
from torch import nn

WIDTH = 32
# The strategy, ranks, wire, settings.
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "zero1": ("zero1", 2, "int4/128", {}),
    "zero1-4": ("zero1", 4, "int8/64", {}),
    "zero2": ("zero2", 2, "int4/64", {}),
    "nodes": ("zero1", 4, "node:int4/128", {"mesh": {"node": 2}}),
    "inside": ("zero2", 4, "local:int4/32", {"mesh": {"node": 2}}),
    "both": ("zero1", 4, "node:int4/32,local:int4/32", {"mesh": {"node": 2}}),
    "host": ("zero2", 2, "int4/128", {"offload": {"optimizer": "host", "gradients": "host"}}),
    "disk": ("zero2", 2, "int4/128", {"offload": {"optimizer": "disk"}}),
    "moved": (
        "zero1",
        2,
        "int4/128",
        {"table": {"optim": {"rest": "SS@host:fp32", "update": "SS@device:fp32"}}},
    ),
}


class Net(nn.Module):
    """The last weight gets no gradient in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("first", "second", "idle"):
            setattr(self, name, nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5))

    def forward(self, x: torch.Tensor, every: bool = False) -> torch.Tensor:
        x = torch.tanh(x @ self.first) @ self.second
        return x @ self.idle if every else x


def settings_of(case: str, path: Any, **more: Any) -> tuple[dict[str, Any], int]:
    strategy, ranks, wire, given = CASES[case]
    given = given | more
    if "disk" in given.get("offload", {}).values():
        given = given | {"offload": given["offload"] | {"path": str(path)}}
    table = given.pop("table", {}) | {"wire": {"publish": wire}}
    settings = config(strategy, None, table=table, optimizer={"type": "AdamW", "lr": 1e-3})
    return settings | given, ranks


def engine_of(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(Net(), settings)


def step_of(engine: Any, step: int, every: bool = False) -> None:
    x = batch(step, dist.get_world_size())[dist.get_rank()]
    out = engine(x.to(engine.module.first.dtype), every).float()
    engine.backward(out.square().mean())
    engine.step()


def resting(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.state_dict(rank0_only=False)
    return found


# ---- what arrives


def published(settings: dict[str, Any], steps: int) -> list[Any]:
    """For each step: the parameters before and after it, and the masters."""
    engine = engine_of(settings)
    seen = []
    for step in range(steps):
        before = resting(engine)
        step_of(engine, step, every=step > 3)
        seen.append((before, resting(engine), masters(engine)))
    engine.close()
    return [*seen, {name: value.detach() for name, value in engine.module.named_parameters()}]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_deltas_arrive_as_coded(case, precision, pools, tmp_path):
    """Masters are those that the optimizer makes, so they are not compared here."""
    settings, ranks = settings_of(case, tmp_path, precision=precision)
    code, _, block = CASES[case][2].rpartition(":")[2].partition("/")
    dtype = training.DTYPES[precision]
    runs = pools(ranks).run(published, settings, 6)
    errors = {"deltas": 0.0, "rounding": 0.0}
    for step in range(6):
        before, after, kept = runs[0][step]
        for name, value in after.items():
            delta = kept[name].to(dtype).float() - before[name].float()
            # A block of the flat begins in each parameter, whose sizes are multiples of a block.
            arrives = (before[name].float() + coded(delta, code, int(block)).nan_to_num()).to(dtype)
            assert torch.equal(value, arrives), (step, name)
            assert all(torch.equal(run[step][1][name], value) for run in runs)
            errors["deltas"] += float((kept[name] - value.float()).square().sum())
            errors["rounding"] += float((kept[name] - kept[name].to(dtype).float()).square().sum())
    assert not torch.equal(runs[0][0][0]["first"], runs[0][5][1]["first"])
    assert all(
        torch.equal(run[6][name], value) for run in runs for name, value in runs[0][6].items()
    )
    if precision == "bf16":
        assert errors["deltas"] < 1.7 * errors["rounding"]


def settled(settings: dict[str, Any]) -> list[float]:
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    apart = []
    for step in range(3, 9):
        found, kept = resting(engine), masters(engine)
        apart.append(max(float((found[k].float() - kept[k]).abs().max()) for k in kept))
        step_of(engine, step, every=True)
    return apart


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_follow_masters_that_stand_still(precision, pools, tmp_path):
    """What a delta rounds away is in the next one."""
    adam = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    settings, ranks = settings_of("zero1", tmp_path, precision=precision, optimizer=adam)
    for apart in pools(ranks).run(settled, settings):
        assert apart[0] > 1e-4
        assert apart[-1] < (1e-7 if precision == "fp32" else 2**-9)
        assert all(later <= before for before, later in zip(apart, apart[1:], strict=False))


# ---- edits


def with_edit(settings: dict[str, Any], edit: Callable[[Any], None]) -> Any:
    """The masters before and after an edit, and after a step that changes nothing else."""
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    kept, seen = masters(engine), resting(engine)
    edit(engine)
    told = masters(engine)
    step_of(engine, 3)
    step_of(engine, 4, every=True)
    state = {name: engine.param_state(p, "param") for name, p in engine.module.named_parameters()}
    return kept, seen, told, masters(engine), state, resting(engine)


def in_place(engine: Any) -> None:
    with torch.no_grad():
        engine.module.first[3, 5] += 1.0
        engine.module.idle[0, :7] = -0.5


def by_data(engine: Any) -> None:
    engine.module.first.data[3, 5] += 1.0
    engine.module.idle.data[0, :7] = -0.5


def gathered(engine: Any) -> None:
    with engine.gathered(write=True), torch.no_grad():
        engine.module.first[3, 5] += 1.0
        engine.module.idle[0, :7] = -0.5


@pytest.mark.parametrize("edit", [in_place, by_data, gathered], ids=lambda one: one.__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["zero1", "zero2", "nodes", "host", "disk", "moved"])
def test_an_edit_changes_what_it_wrote_and_nothing_else(case, precision, edit, pools, tmp_path):
    """Other masters keep what was not published yet, also those without a gradient."""
    adam = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    settings, ranks = settings_of(case, tmp_path, precision=precision, optimizer=adam)
    for kept, seen, told, after, state, rests in pools(ranks).run(with_edit, settings, edit):
        assert not torch.equal(seen["second"].float(), kept["second"])
        expected = {name: value.clone() for name, value in kept.items()}
        one = seen["first"][3, 5] + 1.0
        expected["first"][3, 5] = one.float()
        expected["idle"][0, :7] = -0.5
        for name, value in expected.items():
            assert torch.equal(told[name], value), name
            assert torch.equal(after[name], value), name
            assert torch.equal(state[name], value), name
            assert float((rests[name].float() - value).abs().max()) < 2**-7


def clamped(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Weights are clamped after each step, as for a Wasserstein critic."""
    engine = engine_of(settings)
    for step in range(8):
        step_of(engine, step, every=True)
        with torch.no_grad():
            for value in engine.module.parameters():
                value.clamp_(-0.2, 0.2)
    return resting(engine), masters(engine)


def test_weights_that_are_clamped_in_each_step_still_train(pools, tmp_path):
    settings, ranks = settings_of("zero1", tmp_path)
    plain = settings | {"table": {}}
    (ours, kept), (theirs, _) = (pools(ranks).run(clamped, one)[0] for one in (settings, plain))
    start = Net()
    for name, value in theirs.items():
        went = value - getattr(start, name).detach()
        assert float((kept[name] - value).norm()) < 0.1 * float(went.norm()), name
        assert float(ours[name].abs().max()) <= float(torch.tensor(0.2))


# ---- loads and exact steps


def load_values(settings: dict[str, Any]) -> Any:
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    values = {name: torch.full((WIDTH, WIDTH), 0.1 + i) for i, name in enumerate(masters(engine))}
    engine.load_state_dict(values)
    told, seen = masters(engine), resting(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    step_of(engine, 3, every=True)
    return values, told, seen, masters(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaded_values_are_those_of_the_masters(precision, pools, tmp_path):
    adam = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    settings, ranks = settings_of("zero1", tmp_path, precision=precision, optimizer=adam)
    for values, told, seen, after in pools(ranks).run(load_values, settings):
        for name, value in values.items():
            assert torch.equal(seen[name], value.to(seen[name].dtype))
            assert torch.equal(told[name], value)
            assert torch.equal(after[name], value)


def saved(settings: dict[str, Any], path: str) -> Any:
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    engine.save(path)
    return masters(engine), resting(engine)


def loaded(settings: dict[str, Any], path: str) -> Any:
    engine = engine_of(settings)
    engine.load(path)
    with engine.gathered():
        kept, seen = masters(engine), resting(engine)
    step_of(engine, 3, every=True)
    return kept, seen, masters(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_has_the_masters(precision, pools, tmp_path):
    settings, _ = settings_of("zero1", tmp_path, precision=precision)
    plain = settings | {"strategy": "zero3", "table": {}}
    kept, seen = pools(2).run(saved, settings, str(tmp_path / "one"))[0]
    assert not torch.equal(kept["first"].to(seen["first"].dtype), seen["first"])
    ends = []
    for ranks, config_ in ((2, settings), (4, settings), (2, plain)):
        found, rests, end = pools(ranks).run(loaded, config_, str(tmp_path / "one"))[0]
        ends.append(end)
        for name, value in kept.items():
            assert torch.equal(found[name], value)
            if config_ is settings:
                assert torch.equal(rests[name], value.to(rests[name].dtype))
    for name, value in ends[0].items():  # of equal parameters
        torch.testing.assert_close(ends[2][name], value, rtol=0, atol=2e-3)


def exact(settings: dict[str, Any]) -> list[bool]:
    """After each step: whether the parameters are the rounded masters."""
    engine = engine_of(settings)
    alike = []
    for step in range(8):
        step_of(engine, step, every=True)
        kept, seen = masters(engine), resting(engine)
        alike.append(all(torch.equal(kept[k].to(seen[k].dtype), seen[k]) for k in kept))
    return alike


@pytest.mark.parametrize("case", ["zero1", "nodes", "host", "disk"])
def test_exact_steps_begin_with_exact_parameters(case, pools, tmp_path):
    comm = {"timeout_s": 60, "exact_first": 2, "exact_every": 4}
    settings, ranks = settings_of(case, tmp_path, comm=comm, precision="bf16")
    for alike in pools(ranks).run(exact, settings):
        # Steps 1, 2, 4 and 8 are exact, so the updates of steps 1, 3 and 7 publish exactly.
        assert alike == [True, False, True, False, False, False, True, False]


def first_exact_steps(settings: dict[str, Any], steps: int) -> Any:
    engine = engine_of(settings)
    for step in range(steps):
        step_of(engine, step, every=True)
    return masters(engine)


@pytest.mark.parametrize("case", ["zero1", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_first_steps_are_those_of_plain_wires(case, precision, pools, tmp_path):
    comm = {"timeout_s": 60, "exact_first": 3, "reduce_dtype": "gradient"}
    settings, ranks = settings_of(case, tmp_path, comm=comm, precision=precision)
    plain = settings | {"table": {}, "comm": {"timeout_s": 60, "reduce_dtype": "gradient"}}
    ours, theirs = (pools(ranks).run(first_exact_steps, one, 3)[0] for one in (settings, plain))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


# ---- other users of masters


def with_own_optimizer(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    model = Net()
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    engine = penstock.initialize(
        model, {key: value for key, value in settings.items() if key != "optimizer"}, optimizer=own
    )
    for step in range(4):
        step_of(engine, step, every=step > 1)
    return masters(engine), resting(engine)


def test_an_optimizer_of_your_own(pools, tmp_path):
    settings, ranks = settings_of("zero1", tmp_path)
    plain = settings | {"table": {}}
    (kept, seen), (theirs, _) = (
        pools(ranks).run(with_own_optimizer, one)[0] for one in (settings, plain)
    )
    for name, value in theirs.items():
        torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-3)
        torch.testing.assert_close(seen[name], kept[name], rtol=0, atol=1e-3)


def ledgers(settings: dict[str, Any]) -> Any:
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    return engine.ledger()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["zero1", "zero2", "nodes", "host", "moved"])
def test_the_ledger_has_the_base(case, precision, pools, tmp_path):
    settings, ranks = settings_of(case, tmp_path, precision=precision)
    for ledger in pools(ranks).run(ledgers, settings):
        predicted = ledger["predicted"][settings["strategy"]]
        assert ledger["measured"]["total"] == pytest.approx(predicted["total"], rel=0.05)
        numel = 3 * WIDTH * WIDTH
        size = 4 if precision == "fp32" else 2
        if case != "host":
            assert predicted["param"] >= numel * size * (1 + 1 / ranks)
