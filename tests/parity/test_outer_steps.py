"""Nodes that train on their own (comm.codec "local"): the weights are those of plain AdamW on each
node with torch's SGD over the nodes, and they stay so through checkpoints."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

WIDTH, BLOCKS, ROWS = 24, 3, 4
EVERY, STEPS = 3, 8
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
OUTER = {"outer_every": EVERY, "outer_lr": 0.6, "outer_momentum": 0.8}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 38), nn.Linear(38, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.frozen


def samples(step: int, part: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + micro)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = next(getattr(model, "module", model).parameters()).dtype
    loss: torch.Tensor = (model(x.to(dtype)) - x[:, :5]).float().square().mean()
    return loss


def settings_of(strategy: str, nodes: int, **more: Any) -> dict[str, Any]:
    comm = {"codec": "local", "timeout_s": 60, "outer_wire": "plain"} | OUTER
    return {
        "strategy": strategy,
        "precision": "fp32",
        "optimizer": {"type": "AdamW"} | ADAMW,
        "units": {"modules": ["Block"]},
        "mesh": {"node": nodes} | more.pop("mesh", {}),
        "comm": comm | more.pop("comm", {}),
    } | more


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


class Reference:
    """Nodes of `parts` data ranks each, in one process."""

    def __init__(self, nodes: int, parts: int) -> None:
        self.parts = parts
        self.models, self.anchor = [Net() for _ in range(nodes)], Net()
        self.inner = [torch.optim.AdamW(trained(model), **ADAMW) for model in self.models]
        self.outer = torch.optim.SGD(
            trained(self.anchor), OUTER["outer_lr"], OUTER["outer_momentum"], nesterov=True
        )

    def step(self, step: int, micro: int) -> None:
        for node, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            optimizer.zero_grad()
            for part in range(self.parts):
                for one in range(micro):
                    loss = loss_of(model, samples(step, node * self.parts + part, one))
                    (loss / (self.parts * micro)).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            self.join()

    def join(self) -> None:
        for i, param in enumerate(trained(self.anchor)):
            theirs = [trained(model)[i].data for model in self.models]
            param.grad = torch.stack([param.data - one for one in theirs]).mean(0)
        self.outer.step()
        for model in self.models:
            model.load_state_dict(self.anchor.state_dict())

    def reload(self, still: bool) -> None:
        """All nodes go on with the moments of the first; `still`: without updates."""
        state = self.inner[0].state_dict()
        for optimizer in self.inner:
            optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.param_groups[0].update({"lr": 0.0} if still else {})


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def reference(
    nodes: int,
    parts: int,
    steps: int = STEPS,
    micro: int = 1,
    reload_at: int = 0,
    still: bool = False,
) -> list[Any]:
    """By node: the weights after each step. See `Reference.reload` for the last two arguments."""
    made = Reference(nodes, parts)
    seen: list[Any] = [[] for _ in made.models]
    for step in range(steps):
        made.step(step, micro)
        if step + 1 == reload_at:
            made.reload(still)
        for node, model in enumerate(made.models):
            seen[node].append(weights_of(model))
    return seen


def start(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(Net(), copy.deepcopy(settings))


def step_of(engine: Any, step: int, micro: int = 1) -> None:
    for one in range(micro):
        engine.backward(loss_of(engine, samples(step, engine.data_rank, one)))
    engine.step()


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    with engine.gathered():
        return weights_of(engine.module)


def train(settings: dict[str, Any], steps: int, micro: int = 1) -> tuple[Any, str]:
    engine = start(settings)
    seen = []
    for step in range(steps):
        step_of(engine, step, micro)
        seen.append(gathered(engine))
    said = engine.explain()
    engine.close()
    return seen, said


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Strategy, ranks, nodes, more settings.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "zero1": ("zero1", 4, 2, {}),
    "zero2": ("zero2", 4, 2, {}),
    "zero3": ("zero3", 4, 2, {}),
    "ddp": ("ddp", 2, 2, {}),
    "single": ("zero3", 3, 3, {}),
    "one_node": ("zero3", 2, 1, {}),
    "alone": ("zero3", 1, 1, {}),
    "host": ("zero2", 4, 2, {"offload": {"optimizer": "host", "gradients": "host"}}),
    "disk": ("zero3", 4, 2, {"offload": {"optimizer": "disk", "params": "host"}}),
    "late": ("zero3", 4, 2, {"offload": {"optimizer": "host", "late_update": True}}),
    "window": ("zero3", 4, 2, {"batch": {"accumulate": 2, "micro": ROWS}}),
    "gloo": ("zero3", 4, 2, {"comm": {"backend": "gloo"}}),
    "gloo_again": ("zero1", 4, 2, {"comm": {"backend": "gloo"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_plain_torch(case, pools, tmp_path):
    strategy, world, nodes, more = CASES[case]
    if "disk" in more.get("offload", {}).values():
        more = more | {"offload": more["offload"] | {"path": str(tmp_path)}}
    micro = more.get("batch", {}).get("accumulate", 1)
    expected = reference(nodes, world // nodes, micro=micro)
    found = pools(world).run(train, settings_of(strategy, nodes, **more), STEPS, micro)
    for rank, (seen, said) in enumerate(found):
        assert f"one every {EVERY} steps, over {nodes} nodes" in said
        own = expected[rank // (world // nodes)]
        for step in range(STEPS):
            assert distance(seen[step], own[step]) < 2e-5, f"rank {rank}, step {step + 1}"


@pytest.mark.parametrize("wire", ["int4/128", "int8/64", "plain"])
def test_nodes_agree_bitwise_after_an_outer_step(wire, pools):
    """Also in bf16, whose masters are apart from the parameters."""
    for precision in ("fp32", "bf16"):
        settings = settings_of("zero2", 2, precision=precision, comm={"outer_wire": wire})
        found = pools(4).run(train, settings, 2 * EVERY)
        first = found[0][0]
        for seen, _ in found[1:]:
            for step in range(2 * EVERY):
                same = distance(seen[step], first[step]) == 0
                assert same or (step + 1) % EVERY, f"step {step + 1}"
        assert distance(found[3][0][0], first[0]) > 0, "nodes see different samples"


def test_int4_stays_close_to_plain(pools):
    plain = pools(4).run(train, settings_of("zero2", 2), 4 * EVERY)[0][0][-1]
    coded = settings_of("zero2", 2, comm={"outer_wire": "int4/128"})
    found = pools(4).run(train, coded, 4 * EVERY)[0][0][-1]
    moved = distance(plain, weights_of(Net()))
    assert 0 < distance(plain, found) < 0.25 * moved


# ---- checkpoints


def save_and_go_on(settings: dict[str, Any], path: str, more: int) -> Any:
    """Saves after two outer steps; returns the weights then, and after `more` steps."""
    engine = start(settings)
    for step in range(2 * EVERY):
        step_of(engine, step)
    saved = gathered(engine)
    engine.save(path)
    for step in range(2 * EVERY, 2 * EVERY + more):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return saved, last


def load_and_go_on(settings: dict[str, Any], path: str, more: int) -> Any:
    engine = start(settings)
    assert engine.load(path) is None and engine.steps == 2 * EVERY
    loaded = gathered(engine)
    for step in range(2 * EVERY, 2 * EVERY + more):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return loaded, last


@pytest.mark.parametrize("other", ["same", "more_nodes", "one_node", "none"])
def test_checkpoints(other, pools, tmp_path):
    path, more = str(tmp_path), EVERY
    (saved, last), *_ = pools(4).run(save_and_go_on, settings_of("zero2", 2), path, more)
    loads = {
        "same": (4, settings_of("zero3", 2)),
        "more_nodes": (4, settings_of("zero1", 4)),
        "one_node": (2, settings_of("zero3", 1)),
        "none": (4, settings_of("zero3", 2) | {"comm": {"timeout_s": 60}}),
    }
    world, settings = loads[other]
    found = pools(world).run(load_and_go_on, settings, path, more)
    for loaded, _ in found:
        assert distance(loaded, saved) == 0
    if other == "same":  # both nodes go on with the moments of the first
        expected = reference(2, 2, 3 * EVERY, reload_at=2 * EVERY)
        assert distance(found[0][1], expected[0][-1]) < 2e-5
    assert 0 < distance(found[0][1], last) < 0.1


def momenta_of(settings: dict[str, Any], path: str) -> Any:
    """The weights after an outer step without updates: only the momentum moves them."""
    engine = start(settings)
    engine.load(path)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(2 * EVERY, 3 * EVERY):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return last


def test_momenta_are_in_checkpoints(pools, tmp_path):
    path = str(tmp_path)
    pools(4).run(save_and_go_on, settings_of("zero2", 2), path, 0)
    expected = reference(2, 2, 3 * EVERY, reload_at=2 * EVERY, still=True)[0]
    assert distance(expected[-1], expected[2 * EVERY - 1]) > 1e-3
    for nodes, world in ((2, 4), (3, 3), (1, 2)):
        moved = pools(world).run(momenta_of, settings_of("zero3", nodes), path)[0]
        assert distance(moved, expected[-1]) < 2e-5


def save_too_early(settings: dict[str, Any], path: str) -> str:
    import penstock  # noqa: PLC0415

    engine = start(settings)
    step_of(engine, 0)
    with pytest.raises(penstock.ConfigError) as refused:
        engine.save(path)
    step_of(engine, 1)
    step_of(engine, 2)
    engine.save(path)
    engine.close()
    return str(refused.value)


def test_a_save_between_outer_steps_is_refused(pools, tmp_path):
    for said in pools(4).run(save_too_early, settings_of("zero3", 2), str(tmp_path)):
        assert "each node has its own weights" in said and "multiple of 3" in said


# ---- what else a loop does


def other_calls(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    engine = start(settings)
    with engine.gathered(write=True):
        for param in engine.module.parameters():
            param.data.fill_(float(dist.get_rank() == 0 or dist.get_rank() == 2) / 4)
    written = gathered(engine)
    mean = penstock_mean(engine, float(dist.get_rank()))
    for step in range(EVERY):
        step_of(engine, step)
    joined = gathered(engine)
    ledger = engine.ledger()
    engine.close()
    del penstock
    return written, joined, mean, ledger


def penstock_mean(engine: Any, value: float) -> float:
    mean: float = engine._core.mean(value, True)
    return mean


def test_what_users_write_is_part_of_the_anchors(pools):
    found = pools(4).run(other_calls, settings_of("zero2", 2))
    for written, joined, mean, ledger in found:
        assert mean == 1.5
        assert all(float(one.min()) == 0.25 for one in written.values())
        # Outer steps move weights about as far as inner steps do, not by what was written.
        assert distance(joined, written) < 0.2
        assert distance(joined, found[0][1]) == 0
        measured, predicted = ledger["measured"], ledger["predicted"]["zero2"]
        assert 0.9 < measured["optim"] / predicted["optim"] < 1.1


def in_pipeline(settings: dict[str, Any], steps: int) -> Any:
    engine = start(settings)
    seen = []
    for step in range(steps):
        engine.train_batch(samples(step, engine.data_rank), lambda out, x: loss_of_output(out, x))
        seen.append(gathered(engine))
    engine.close()
    return seen


def loss_of_output(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (out - x[:, :5]).float().square().mean()


MESHES: dict[str, tuple[int, int, dict[str, int], dict[str, Any]]] = {
    "tensor": (
        4,
        2,
        {"tensor": 2},
        {"parallel": {"rules": {"blocks.*.one": "column", "blocks.*.two": "row"}}},
    ),
    "pipeline": (4, 2, {"pipeline": 2}, {"batch": {"accumulate": 2}}),
    "stages": (8, 2, {"pipeline": 2}, {"batch": {"accumulate": 2}}),
}


@pytest.mark.parametrize("case", MESHES)
def test_nodes_of_model_ranks(case, pools):
    world, nodes, mesh, more = MESHES[case]
    settings = settings_of("zero1", nodes, mesh=mesh, **more)
    copies = world // nodes // mesh.get("tensor", 1) // mesh.get("pipeline", 1)
    expected = reference(nodes, copies)
    if "pipeline" in mesh:
        found = pools(world).run(in_pipeline, settings, STEPS)
    else:
        found = [seen for seen, _ in pools(world).run(train, settings, STEPS)]
    per_stage = world // mesh.get("pipeline", 1) // nodes
    for rank, seen in enumerate(found):
        own = expected[rank // per_stage % nodes]
        for step in range(STEPS):
            assert distance(seen[step], own[step]) < 2e-5, f"rank {rank}, step {step + 1}"


def later_writes(settings: dict[str, Any]) -> Any:
    """Weights that are written after an outer step, and those after the next one."""
    engine = start(settings)
    for step in range(EVERY):
        step_of(engine, step)
    with engine.gathered(write=True):
        for param in engine.module.parameters():
            param.data.fill_(0.25)
    for step in range(EVERY, 2 * EVERY):
        step_of(engine, step)
    found = gathered(engine)
    engine.close()
    return found


def test_later_writes_are_part_of_the_anchors(pools):
    for found in pools(4).run(later_writes, settings_of("zero2", 2)):
        assert all(float((one - 0.25).abs().max()) < 0.2 for one in found.values())


# ---- errors


def refusal(settings: dict[str, Any], own: bool = False) -> str:
    import penstock  # noqa: PLC0415

    model = Net()
    optimizer = None
    if own:
        settings = {key: value for key, value in settings.items() if key != "optimizer"}
        optimizer = torch.optim.Adamax(trained(model))
    with pytest.raises(penstock.ConfigError) as refused:
        penstock.initialize(model, copy.deepcopy(settings), optimizer=optimizer)
    return str(refused.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"precision": "fp16"}, "compute in fp16"),
    "skip": ({"nonfinite": "skip"}, '"nonfinite" is "skip"'),
    "signals": ({"checkpoint": {"signals": ["SIGUSR1"], "path": "x"}}, "checkpoint.signals"),
    "ddp": ({"strategy": "ddp"}, "keeps equal masters on the 2 data ranks of a node"),
    "three": ({"mesh": {"node": 3}}, 'cannot form "mesh.node" 3 nodes'),
    "wire": ({"comm": {"codec": "local", "outer_wire": "sign/128"}}, '"comm.outer_wire"'),
    "every": ({"comm": {"codec": "local", "outer_every": 0}}, '"comm.outer_every" is 0'),
    "without": ({"comm": {"outer_every": 8}}, "without comm.codec"),
    "exact": ({"comm": {"codec": "local", "exact_first": 3}}, "no effect"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, pools):
    more, says = REFUSED[case]
    for said in pools(4).run(refusal, settings_of("zero2", 2) | more):
        assert says in said


def test_an_optimizer_of_your_own_is_refused(pools):
    for said in pools(4).run(refusal, settings_of("zero2", 2), True):
        assert "the optimizer is your own" in said


def ends_early(settings: dict[str, Any]) -> str:
    """The second node closes its engine before the outer step."""
    import penstock  # noqa: PLC0415

    engine = start(settings)
    steps = EVERY if dist.get_rank() < 2 else EVERY - 1
    said = ""
    try:
        for step in range(steps):
            step_of(engine, step)
    except penstock.RuntimeFault as error:
        said = str(error)
    try:
        engine.close()
    except penstock.RuntimeFault as error:
        said += str(error)
    return said


def test_a_node_that_ends_early(pools):
    said = pools(4).run(ends_early, settings_of("zero2", 2))
    assert all("close()" in one for one in said[:2]), said


def dies(settings: dict[str, Any]) -> str:
    """The last rank of the second node ends in its second step."""
    import penstock  # noqa: PLC0415

    engine = start(settings)
    try:
        for step in range(EVERY):
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step_of(engine, step)
    except penstock.RuntimeFault as error:
        return str(error)
    return ""


def test_a_rank_that_dies(pools):
    pool = pools(4)
    pool.start(dies, settings_of("zero2", 2))
    began = time.monotonic()
    got = pool.outcomes({0, 1, 2}, 60)
    pool.kill()
    assert time.monotonic() - began < 30
    assert "lost" in got[2], "its node sees it at once"
    # The first node trains on until the outer step.
    assert any("outer u" in got[rank] for rank in (0, 1)), got


def dropped(settings: dict[str, Any]) -> float:
    """An engine without close(), and a second one after it."""
    engine = start(settings)
    step_of(engine, 0)
    del engine
    gc.collect()
    again = start(settings)
    for step in range(EVERY):
        step_of(again, step)
    weights = gathered(again)
    again.close()
    return float(weights["head.weight"].sum())


def test_engines_that_are_dropped(pools):
    found = pools(4).run(dropped, settings_of("zero3", 2))
    assert len(set(found)) == 1
