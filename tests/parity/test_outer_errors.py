"""What nodes that train on their own refuse, and what the others hear when a node fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from outer_nodes import (
    EVERY,
    Net,
    distance,
    gathered,
    reference,
    settings_of,
    start,
    step_of,
    trained,
)


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


def refused_on_one(settings: dict[str, Any], own: dict[str, Any]) -> tuple[str, float]:
    """What initialize() raises if the last rank has settings of its own, and after which time."""
    import penstock  # noqa: PLC0415

    begun = time.monotonic()
    with pytest.raises((penstock.ConfigError, penstock.RuntimeFault)) as refused:
        penstock.initialize(Net(), settings | (own if dist.get_rank() == 3 else {}))
    return str(refused.value), time.monotonic() - begun


@pytest.mark.parametrize("own", [{"clip": -1.0}, {"clip": 0.5}])
def test_all_nodes_hear_of_an_error_in_initialize(own, pools):
    found = pools(4).run(refused_on_one, settings_of("zero2", 2), own)
    for said, seconds in found:
        assert "clip" in said and seconds < 30


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


def other_settings(settings: dict[str, Any]) -> str:
    import penstock  # noqa: PLC0415

    if dist.get_rank() >= 2:
        settings = settings | {"clip": 0.5}
    with pytest.raises(penstock.RuntimeFault) as refused:
        start(settings)
    return str(refused.value)


def test_nodes_with_different_configs(pools):
    for said in pools(4).run(other_settings, settings_of("zero2", 2)):
        assert "the nodes have different models or configs" in said and "clip" in said


def writes_by_node(settings: dict[str, Any]) -> str:
    """Each node writes values of its own, which only the next outer step can see."""
    import penstock  # noqa: PLC0415

    engine = start(settings)
    with engine.gathered(write=True):
        engine.module.head.weight.data.fill_(float(dist.get_rank() // 2))
    with pytest.raises(penstock.RuntimeFault) as refused:
        for step in range(EVERY):
            step_of(engine, step)
    with pytest.raises(penstock.ConfigError, match="between outer steps"):
        engine.save("anywhere")
    with contextlib.suppress(penstock.RuntimeFault):
        engine.close()
    with pytest.raises(penstock.RuntimeFault, match="closed"):
        engine.save("anywhere")
    return str(refused.value)


def test_nodes_with_different_weights(pools):
    for said in pools(4).run(writes_by_node, settings_of("zero2", 2)):
        assert "with different weights" in said


def catches(settings: dict[str, Any], path: str) -> Any:
    """The second node catches an error of its own, goes on late, and saves with the first."""
    engine = start(settings)
    if dist.get_rank() >= 2:
        with pytest.raises(RuntimeError):
            engine(torch.zeros(1, 3))
        time.sleep(4)
    for step in range(EVERY):
        step_of(engine, step)
    engine.save(path)
    found = gathered(engine)
    engine.close()
    return found


def test_an_error_that_is_caught(pools, tmp_path):
    expected = reference(2, 2, EVERY)[0][-1]
    for found in pools(4).run(catches, settings_of("zero2", 2), str(tmp_path)):
        assert distance(found, expected) < 2e-5


def saves_behind(settings: dict[str, Any], path: str) -> Any:
    engine = start(settings)
    engine.register_for_checkpointing(Counter(dist.get_rank()))
    for step in range(EVERY):
        step_of(engine, step)
    engine.save(path, wait=False)
    saved = gathered(engine)
    for step in range(EVERY):
        step_of(engine, step)
    engine.load(path)
    loaded = gathered(engine)
    counter = engine._registered[0].value
    engine.export_hf(path + "/hf")
    engine.close()
    return distance(saved, loaded), counter


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_save_in_the_background(pools, tmp_path):
    found = pools(4).run(saves_behind, settings_of("zero3", 2), str(tmp_path))
    assert [moved for moved, _ in found] == [0.0] * 4
    assert [counter for _, counter in found] == [0, 1, 0, 1], "those of the first node"
    assert (tmp_path / "hf" / "model.safetensors").exists()


def dies(settings: dict[str, Any]) -> str:
    """The last rank of the second node ends in its second step."""
    import penstock  # noqa: PLC0415

    engine = start(settings)
    try:
        for step in range(EVERY):
            if step == 1:
                ranks.note("trains")
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step_of(engine, step)
    except penstock.RuntimeFault as error:
        return str(error)
    return ""


def test_a_rank_that_dies(pools):
    pool = pools(4)
    pool.start(dies, settings_of("zero2", 2))
    pool.notes("trains", 240)
    began = time.monotonic()
    got = pool.outcomes({0, 1, 2}, 60)
    pool.kill()
    assert time.monotonic() - began < 30
    assert "lost" in got[2], "its node sees it at once"
    # The first node trains on until the outer step.
    assert any("outer step" in got[rank] for rank in (0, 1)), got


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
