"""Parameters published by deltas: what arrives is what the documented code gives, no change is
lost, and edits, loads and exact steps publish the values themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compare
import pytest
import torch
import torch.distributed as dist
import training
import zoo
from test_wires import batch, coded, config
from torch import nn
from training import Case

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
    # Parameters rest sharded inside nodes, so users cannot write to them outside gathered().
    "sharded": ("zero1", 4, "node:int4/64", {"mesh": {"node": 2}}),
}


def drawn() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)


class Idle(nn.Module):
    """A unit without a gradient in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = drawn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = drawn(), drawn()
        self.idle = Idle()

    def forward(self, x: torch.Tensor, every: bool = False) -> torch.Tensor:
        x = torch.tanh(x @ self.first) @ self.second
        return self.idle(x) if every else x


def settings_of(case: str, path: Any, **more: Any) -> tuple[dict[str, Any], int]:
    strategy, ranks, wire, given = CASES[case]
    given = given | more
    if "disk" in given.get("offload", {}).values():
        given = given | {"offload": given["offload"] | {"path": str(path)}}
    table = given.pop("table", {}) | {"wire": {"publish": wire}}
    if case == "sharded":
        table["param"] = {"rest": f"RS@device:{given.get('precision', 'fp32')}"}
    adam = {"type": "AdamW", "lr": 1e-3}
    settings = config(strategy, None, table=table, optimizer=adam, units={"modules": ["Idle"]})
    return settings | given, ranks


def engine_of(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(Net(), settings)


def step_of(engine: Any, step: int, every: bool = False) -> None:
    x = batch(step, dist.get_world_size())[dist.get_rank()]
    dtype = training.DTYPES[engine.config.precision or "fp32"]
    out = engine(x.to(dtype), every).float()
    engine.backward(out.square().mean())
    engine.step()


def resting(engine: Any) -> dict[str, torch.Tensor]:
    with engine.gathered():
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


def with_edit(settings: dict[str, Any], edit: Callable[[Any], None], path: str) -> Any:
    """The masters and the parameters before an edit; the masters after it by all ways to read
    them, and after steps that change nothing else; the parameters at the end."""
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    kept, seen = masters(engine), resting(engine)
    edit(engine)
    if path:
        engine.save(path)
        other = engine_of(settings)
        other.load(path)
        told = [masters(other)]
        other.close()
    else:
        params = engine.module.named_parameters()
        told = [{name: engine.param_state(p, "param") for name, p in params}]
    told.append(masters(engine))
    step_of(engine, 3)
    step_of(engine, 4, every=True)
    return kept, seen, [*told, masters(engine)], resting(engine)


def in_place(engine: Any) -> None:
    with torch.no_grad():
        engine.module.first[3, 5] += 1.0
        engine.module.idle.weight[0, :7] = -0.5


def by_data(engine: Any) -> None:
    engine.module.first.data[3, 5] += 1.0
    engine.module.idle.weight.data[0, :7] = -0.5


def other_memory(engine: Any) -> None:
    first, idle = engine.module.first.data.clone(), engine.module.idle.weight.data.clone()
    first[3, 5] += 1.0
    idle[0, :7] = -0.5
    engine.module.first.data, engine.module.idle.weight.data = first, idle


def gathered(engine: Any) -> None:
    with engine.gathered(write=True):
        in_place(engine)


EDITS = [
    pytest.param(case, edit, id=f"{case}-{edit.__name__}")
    for case in ("zero1", "zero2", "nodes", "host", "disk", "moved", "sharded")
    for edit in (in_place, by_data, other_memory, gathered)
    if case != "sharded" or edit is gathered
]


@pytest.mark.parametrize("way", ["state", "save"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("case", "edit"), EDITS)
def test_an_edit_changes_what_it_wrote_and_nothing_else(
    case, precision, edit, way, pools, tmp_path
):
    """Masters keep what was not published yet, also those without a gradient and those edited.
    gathered(write=True) has published everything."""
    adam = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    settings, ranks = settings_of(case, tmp_path, precision=precision, optimizer=adam)
    path = str(tmp_path / "saved") if way == "save" else ""
    for kept, seen, told, rests in pools(ranks).run(with_edit, settings, edit, path):
        assert not torch.equal(seen["second"].float(), kept["second"])
        expected = {name: value.clone() for name, value in kept.items()}
        now = {name: value.to(seen[name].dtype) for name, value in kept.items()}
        published = now if edit is gathered else seen
        unsent = {name: now[name].float() - published[name].float() for name in now}
        one = (published["first"][3, 5] + 1.0).float()
        expected["first"][3, 5] = one + unsent["first"][3, 5]
        expected["idle.weight"][0, :7] = -0.5 + unsent["idle.weight"][0, :7]
        for name, value in expected.items():
            for found in told:
                assert torch.equal(found[name], value), name
            assert float((rests[name].float() - value).abs().max()) < 2**-7


def edit_idle(settings: dict[str, Any]) -> Any:
    """An edit of a parameter that the next step has no gradient for. Nothing reads masters before
    that step."""
    engine = engine_of(settings)
    for step in range(2):
        step_of(engine, step, every=True)
    engine.module.idle.weight.data[0, :7] = 3.0
    step_of(engine, 2)
    rests = resting(engine)
    return rests["idle.weight"], masters(engine)["idle.weight"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["zero1", "nodes", "host", "moved"])
def test_an_edit_without_a_gradient_is_published(case, precision, pools, tmp_path):
    settings, ranks = settings_of(case, tmp_path, precision=precision)
    for rests, kept in pools(ranks).run(edit_idle, settings):
        for found in (rests.float(), kept):
            assert float((found[0, :7] - 3.0).abs().max()) < 2**-6
            assert float(found[1:].max()) < 2.0


def clamp(value: torch.Tensor) -> None:
    value.clamp_(-0.2, 0.2)


def shrink(value: torch.Tensor) -> None:
    value.mul_(0.999)


def prune(value: torch.Tensor) -> None:
    value[::2] = 0.0


def edited_each_step(settings: dict[str, Any], edit: Callable[[torch.Tensor], None]) -> Any:
    engine = engine_of(settings)
    for step in range(12):
        step_of(engine, step, every=True)
        with torch.no_grad():
            for value in engine.module.parameters():
                edit(value)
    return resting(engine), masters(engine)


@pytest.mark.parametrize("edit", [clamp, shrink, prune], ids=lambda one: one.__name__)
def test_weights_that_are_edited_after_each_step_still_train(edit, pools, tmp_path):
    settings, ranks = settings_of("zero1", tmp_path)
    plain = settings | {"table": {}}
    (ours, kept), (theirs, _) = (
        pools(ranks).run(edited_each_step, one, edit)[0] for one in (settings, plain)
    )
    start = dict(Net().named_parameters())
    for name, value in theirs.items():
        went = value - start[name].detach()
        assert float((kept[name] - value).norm()) < 0.1 * float(went.norm()), name
        if edit is clamp:
            assert float(ours[name].abs().max()) <= float(torch.tensor(0.2))
        if edit is prune:
            assert not ours[name][::2].any()
            assert float(kept[name][::2].abs().max()) < 1e-3  # what a delta does not show yet


# ---- loads and exact steps


def load_values(settings: dict[str, Any], initial: bool) -> Any:
    """`initial`: after one step, so that many parameters at rest are still the initial ones."""
    engine = engine_of(settings)
    for step in range(1 if initial else 3):
        step_of(engine, step, every=True)
    values = {name: torch.full((WIDTH, WIDTH), 0.1 + i) for i, name in enumerate(masters(engine))}
    if initial:
        values = {name: value.detach() for name, value in Net().named_parameters()}
        seen = resting(engine)
        assert any(bool((seen[k] == v.to(seen[k].dtype)).any()) for k, v in values.items())
    engine.load_state_dict(values)
    told, seen = masters(engine), resting(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    step_of(engine, 3, every=True)
    return values, told, seen, masters(engine)


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaded_values_are_those_of_the_masters(precision, initial, pools, tmp_path):
    adam: dict[str, Any] = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.0}
    if initial:  # gradients and thus deltas of all sizes
        adam = {"type": "SGD", "lr": 0.1}
    settings, ranks = settings_of("zero1", tmp_path, precision=precision, optimizer=adam)
    for values, told, seen, after in pools(ranks).run(load_values, settings, initial):
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


def set_state(settings: dict[str, Any]) -> Any:
    engine = engine_of(settings)
    for step in range(3):
        step_of(engine, step, every=True)
    kept = masters(engine)
    engine.set_param_state(engine.module.first, "param", torch.full((WIDTH, WIDTH), 0.3))
    return kept, masters(engine), resting(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_a_parameter_can_be_set(precision, pools, tmp_path):
    settings, ranks = settings_of("zero1", tmp_path, precision=precision)
    for kept, after, seen in pools(ranks).run(set_state, settings):
        kept["first"] = torch.full((WIDTH, WIDTH), 0.3)
        for name, value in kept.items():
            assert torch.equal(after[name], value)
        assert torch.equal(seen["first"], kept["first"].to(seen["first"].dtype))


def with_own_optimizer(settings: dict[str, Any], edits: bool) -> Any:
    import penstock  # noqa: PLC0415

    model = Net()
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    engine = penstock.initialize(
        model, {key: value for key, value in settings.items() if key != "optimizer"}, optimizer=own
    )
    for step in range(6):
        step_of(engine, step, every=step > 1)
        if edits and step == 3:
            in_place(engine)
    return masters(engine), resting(engine)


@pytest.mark.parametrize("edits", [False, True])
def test_an_optimizer_of_your_own(edits, pools, tmp_path):
    settings, ranks = settings_of("zero1", tmp_path)
    plain = settings | {"table": {}}
    (kept, seen), (theirs, _) = (
        pools(ranks).run(with_own_optimizer, one, edits)[0] for one in (settings, plain)
    )
    start = dict(Net().named_parameters())
    for name, value in theirs.items():
        went = float((value - start[name].detach()).norm())
        assert float((kept[name] - value).norm()) < 0.05 * went, name
        assert float((seen[name] - kept[name]).norm()) < 0.1 * went, name


TRAININGS = [
    Case("zero1", "fp16", clip=True),
    Case("zero1", "bf16", world=4, accumulate=2),
    Case("zero2", clip=True, world=3),
    Case("zero2", "bf16", recompute="nonreentrant"),
    Case("zero1", world=4, model="parts", tensor=2),
    *(Case("zero1", "bf16", model=name) for name in zoo.EVERYWHERE),
]


@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_deltas_train_like_plain_torch(case, pools):
    table = {"wire": {"publish": "int4/64"}}
    compare.lossy_runs(case, pools, {"table": table}, limit=0.01)


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
