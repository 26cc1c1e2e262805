"""Expert ranks: the steps are those of plain torch in one process with whole experts.

`pytest tests/parity/test_experts.py --full -n 2 --dist worksteal` runs every case.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import compare
import expert_models
import meshes
import pipeline_models
import pytest
import torch
import torch.distributed as dist
from test_meshes import SAMPLED_STEPS, check
from torch import nn

pytestmark = pytest.mark.timeout(480)
STRIDE = 17  # which the numbers of strategies and kinds of steps have no part with


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    cases = meshes.expert_cases()
    chosen = cases if metafunc.config.getoption("full") else cases[::STRIDE]
    chosen = sorted(chosen, key=lambda one: one.world)  # pools of one size after the other
    metafunc.parametrize("case", chosen, ids=[one.name for one in chosen])


def test_trains(case, pools, tmp_path, largest, request):
    steps = meshes.STEPS if request.config.getoption("full") else SAMPLED_STEPS
    check(
        pools(case.world).run(meshes.run, case, str(tmp_path), "cpu", steps, timeout=200), largest
    )


# ---- the life of an engine

UP, DOWN = (f"blocks.0.mixture.experts.{name}" for name in ("up", "down"))


def start(world: int, expert: int, config: Any = None, model: nn.Module | None = None) -> Any:
    import penstock  # noqa: PLC0415

    ranks = meshes.Case((("data", world), ("expert", expert)), "zero3", "experts", "one")
    expert_models.meet(ranks.expert_groups())
    made: dict[str, Any] = {
        "strategy": "zero3",
        "mesh": {"expert": expert},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "clip": 0.5,
        "comm": {"timeout_s": 60},
    }
    if expert > 1:
        made["parallel"] = {"rules": dict(expert_models.RULES)}
    return penstock.initialize(model or expert_models.build(), made | (config or {}))


def plain_gradients(world: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = expert_models.build()
    for rank in range(world):
        (model(**pipeline_models.batch(0, rank, 1)) / world).backward()
    grads = {name: one.grad for name, one in model.named_parameters()}
    return compare.norm(grads), grads


def backward(engine: Any) -> None:
    engine.backward(engine(**pipeline_models.batch(0, engine.data_rank, 1)))


def lives(world: int, expert: int, strategy: str) -> dict[str, Any]:
    engine = start(world, expert, {"strategy": strategy, "batch": {"accumulate": 2}})
    norm, theirs = plain_gradients(world)
    backward(engine)
    open_sums = compare.gradient_deviation(engine.full_grads(), theirs)
    backward(engine)
    sums = compare.gradient_deviation(engine.full_grads(), theirs)
    # Twice the gradients, set by the user: the clipped step is the same, and the norm is twice.
    engine.set_grads({name: 2 * one for name, one in engine.full_grads().items()})
    set_sums = compare.gradient_deviation(
        engine.full_grads(), {name: 2 * one for name, one in theirs.items()}
    )
    engine.step()
    told = {"norm": abs(engine.grad_norm - 2 * norm) / norm, "open": open_sums, "set": set_sums}
    told["sums"] = sums

    stepped = {n: p.detach().clone() for n, p in expert_models.build().named_parameters()}
    for name, one in stepped.items():
        one -= 0.1 * 0.5 / norm * theirs[name]
    alone = engine.state_dict()  # on rank 0
    everywhere = engine.state_dict(rank0_only=False)
    told["weights"] = compare.weight_deviation(everywhere, stepped)
    if dist.get_rank() == 0:
        assert all(torch.equal(one, everywhere[name]) for name, one in alone.items())

    experts = engine.module.blocks[0].mixture.experts
    told["shape"] = (experts.up.shape[0], expert_models.EXPERTS // expert)
    with engine.gathered(write=True):
        assert torch.equal(experts.up, everywhere[UP])
        experts.up.data.mul_(0.5)
        experts.down.data[1].zero_()
    changed = engine.state_dict(rank0_only=False)
    assert torch.equal(changed[UP], everywhere[UP] / 2)
    assert not changed[DOWN][1].any()
    engine.close()
    for name, one in changed.items():
        assert torch.equal(one, dict(engine.module.named_parameters())[name])
    return told


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("world", "expert"), [(2, 2), (4, 2), (4, 1)])
def test_lives(world, expert, strategy, pools):
    for told in pools(world).run(lives, world, expert, strategy):
        assert told["shape"][0] == told["shape"][1]
        limits = {"norm": 1e-5, "open": 1e-6, "sums": 1e-6, "set": 1e-6, "weights": 1e-6}
        assert all(told[name] < limit for name, limit in limits.items()), told


def sets_unused(strategy: str) -> tuple[float, float]:
    """Gradients that a user sets for experts that no backward has reached."""
    engine = start(4, 2, {"strategy": strategy, "clip": 0.0})
    before = engine.state_dict(rank0_only=False)[UP]
    engine.module.blocks[0].skips = True
    backward(engine)
    given = torch.arange(float(before.numel())).view_as(before) / before.numel()
    engine.set_grads({UP: given})
    read = float((engine.full_grads()[UP] - given).abs().max())
    engine.step()
    after = engine.state_dict(rank0_only=False)[UP]
    engine.close()
    return read, float((before - 0.1 * given - after).abs().max())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_sets_unused(strategy, pools):
    for told in pools(4).run(sets_unused, strategy):
        assert max(told) < 1e-6, told


def accounts(strategy: str) -> list[tuple[int, int]]:
    """Peaks of state, buffers and the number of exchanges, measured and predicted."""
    engine = start(4, 2, {"strategy": strategy, "optimizer": {"type": "AdamW"}})
    for _ in range(3):
        backward(engine)
        engine.step()
    ledger = engine.ledger()
    engine.close()
    both = ledger["measured"], ledger["predicted"][strategy]
    kinds = ("param", "grad", "optim", "buffers", "total", "exchanges")
    return [(both[0][kind], both[1][kind]) for kind in kinds]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_ledger_knows_experts(strategy, pools):
    for told in pools(4).run(accounts, strategy):
        assert all(abs(measured - predicted) <= 0.1 * predicted for measured, predicted in told)
        assert told[-1][0] == told[-1][1]


def copies(engine):
    copy.deepcopy(engine.module)


def asks_the_model_for_its_state(engine):
    engine.module.state_dict()


def hooks(engine):
    handle = engine.module.blocks[0].mixture.experts.up.register_hook(lambda grad: grad)
    try:
        backward(engine)
    finally:
        handle.remove()


def sets_a_part(engine):
    backward(engine)
    engine.set_grads({UP: torch.zeros(2, 16, 32)})


ERRORS = [
    (copies, "a part of some parameters \\(mesh.expert\\)"),
    (asks_the_model_for_its_state, "Use engine.state_dict"),
    (hooks, '"blocks.0.mixture.experts.up" has a hook'),
    (sets_a_part, "has shape \\[2, 16, 32\\], but its parameter has \\[4, 16, 32\\]"),
]


def raises(story: Any) -> str:
    engine = start(2, 2, {"strategy": "ddp"})
    try:
        story(engine)
        said = ""
    except (RuntimeError, ValueError) as error:
        said = str(error)
    engine.zero_grad()
    backward(engine)
    engine.step()
    engine.close()
    return said


@pytest.mark.parametrize(("story", "expected"), ERRORS, ids=lambda v: getattr(v, "__name__", ""))
def test_error(story, expected, pools):
    for said in pools(2).run(raises, story):
        assert re.search(expected, said), said


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(3, 4, 4))


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "no rule": (2, {"parallel": {}}, 'Parameters of three dims: "blocks.0.mixture.experts.up"'),
    "odd": (2, {"parallel": {"rules": {"experts": "expert"}}}, '"experts.up" has 3 rows'),
    "a list": (2, {"parallel": {"rules": {"blocks": "expert"}}}, "no module or parameter matches"),
    "ranks": (2, {"mesh": {"expert": 3}}, "does not divide the 2 data-parallel ranks of a node"),
    "nodes": (2, {"mesh": {"expert": 2, "node": 2}}, "does not divide the 1 data-parallel ranks"),
    "sequence": (2, {"mesh": {"expert": 2, "sequence": 2}}, "not supported with"),
    "tiling": (2, {"tiling": {"max_bytes": 64}}, '"tiling" is not supported with expert ranks'),
}


def refused(expert: int, config: Any, odd: bool) -> str:
    try:
        start(2, expert, config, Three() if odd else None).close()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, pools):
    expert, config, expected = REFUSED[name]
    for said in pools(2).run(refused, expert, config, name == "odd"):
        assert expected in said, said


def own_optimizer() -> str:
    import penstock  # noqa: PLC0415

    model = expert_models.build()
    config = {"mesh": {"expert": 2}, "parallel": {"rules": dict(expert_models.RULES)}}
    try:
        penstock.initialize(model, config, optimizer=torch.optim.Adamax(model.parameters()))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_refuses_an_optimizer_of_the_user(pools):
    for said in pools(2).run(own_optimizer):
        assert '"mesh.expert" is 2: an optimizer of your own' in said


# ---- checkpoints

STATES = {
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "zero3 disk": {"strategy": "zero3", "offload": {"optimizer": "disk", "params": "host"}},
}
LAYOUTS = [
    ((("data", 4), ("expert", expert)), state) for expert in (1, 2, 4) for state in STATES
] + [
    ((("tensor", 2), ("data", 2), ("expert", 2)), "zero1"),
    ((("pipeline", 2), ("data", 2), ("expert", 2)), "zero3"),
]


def of_layout(layout: Any, path: str) -> Any:
    import penstock  # noqa: PLC0415

    mesh, state = layout
    case = meshes.Case(mesh, state, "experts", "two" if dict(mesh)["data"] == 2 else "one")
    expert_models.meet(case.expert_groups())
    made = case.config(path) | {"batch": {"accumulate": 4 // case.size("data")}, "clip": 1.0}
    return penstock.initialize(expert_models.build(), made)


def train(engine: Any, step: int) -> float:
    """The same four samples on every mesh."""
    count = 4 // engine.data_size
    own = range(engine.data_rank * count, (engine.data_rank + 1) * count)
    return float(engine.train_batch(iter([pipeline_models.batch(step, one, 1) for one in own])))


def goes(first: Any, others: list[Any], path: str) -> list[Any]:
    engine = of_layout(first, path)
    for step in range(2):
        train(engine, step)
    engine.save(path, "one")
    saved = engine.state_dict(rank0_only=False)
    loss = train(engine, 2)
    after = engine.state_dict(rank0_only=False)
    engine.close()
    told = []
    for other in others:
        engine = of_layout(other, path)
        engine.load(path, "one")
        loaded = engine.state_dict(rank0_only=False)
        assert all(torch.equal(saved[name], one) for name, one in loaded.items()), other
        apart = abs(train(engine, 2) - loss)
        weights = compare.weight_deviation(engine.state_dict(rank0_only=False), after)
        told.append((other, apart, weights))
        engine.close()
    return told


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_loads_with_any(number, pools, tmp_path, request):
    some = [LAYOUTS[(number + step) % len(LAYOUTS)] for step in (1, 4)]
    others = LAYOUTS if request.config.getoption("full") else some
    for told in pools(4).run(goes, LAYOUTS[number], others, str(tmp_path), timeout=280):
        for other, loss, weights in told:
            assert loss < 1e-5 and weights < 1e-5, f"{LAYOUTS[number]} to {other}: {told}"
