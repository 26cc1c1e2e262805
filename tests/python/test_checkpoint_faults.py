"""A save that is killed or has no room: the checkpoints before it stay, and nothing of it does."""

from __future__ import annotations

import pathlib
import random
import re
import resource
import subprocess
import sys
import time
import warnings

import checkpoints
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

NUM_KILLS, NUM_KILLS_FULL = 4, 200
SIZE, LR = 384, 0.5
# Every weight is -LR times the number of steps, so what is loaded shows which step it is of.
SCRIPT = f"""
import sys, torch, penstock
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear({SIZE}, {SIZE}, bias=False) for _ in range(3)])
for layer in model:
    nn.init.zeros_(layer.weight)

class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model
    def forward(self):
        return sum(layer.weight.sum() for layer in self.layers)

tier = {{}} if sys.argv[2] == "memory" else {{"optimizer": "disk", "path": sys.argv[3]}}
engine = penstock.initialize(
    Constant(),
    {{"strategy": "zero1", "precision": "bf16", "offload": tier, "checkpoint": {{"keep": 3}}}},
    optimizer={{"type": "SGD", "lr": {LR}}},
)
while True:
    engine.backward(engine())
    engine.step()
    engine.save(sys.argv[1], client_state=engine.steps, wait=engine.steps % 3 == 0)
    if engine.steps == 3:
        print("saved", flush=True)
"""


def pytest_generate_tests(metafunc):
    if "kill" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("kill", range(NUM_KILLS_FULL if full else NUM_KILLS))


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)])

    def forward(self):
        return sum(layer.weight.sum() for layer in self.layers)


def ranks_of(launcher):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(pid) for pid in found.stdout.split()]


def load_newest(folder):
    """The step that the newest is of, and every weight of it."""
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(Constant(), {"strategy": "zero3"}, optimizer={"type": "SGD"})
    step = engine.load(folder)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return step, {float(value) for w in weights.values() for value in (w.min(), w.max())}


def test_a_kill_leaves_a_whole_checkpoint(kill, pools, tmp_path):
    import penstock  # noqa: PLC0415

    chance = random.Random(kill)
    folder, script = tmp_path / "ck", tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2", "--grace-s", "1"]
    tier = chance.choice(["memory", "disk"])
    launcher = subprocess.Popen(
        [*command, str(script), str(folder), tier, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert any("saved" in line for line in launcher.stdout)
        time.sleep(chance.uniform(0.0, 0.5))
        victims = chance.choice([[0], [1], [0, 1], []])  # none: the launcher, and so all of them
        ranks = [psutil.Process(pid) for pid in sorted(ranks_of(launcher))]
        for rank, process in enumerate(ranks):
            if rank in victims:
                process.kill()
        if not victims:
            launcher.kill()
        launcher.wait(30)
        assert not psutil.wait_procs(ranks, 30)[1]  # a lock is held until they are gone
    finally:
        launcher.kill()
        launcher.stdout.close()
    latest = (folder / "latest").read_text().strip()
    assert (folder / latest / "checkpoint.json").is_file()
    for one in folder.glob("*/checkpoint.json"):
        if not one.parent.name.startswith("."):
            penstock._native._penstock.CheckpointReader(str(one.parent)).verify()
    for step, weights in pools(1).run(load_newest, str(folder)):
        assert step >= 3
        assert weights == {-LR * step}
    # It also takes away what was left, when the system has let go of the locks of who was killed.
    for _ in range(5):
        pools(1).run(save_once, str(folder))
        left = [p for p in folder.iterdir() if p.name.startswith(".")]
        if not left:
            break
        time.sleep(1.0)
    assert not left


def save_once(folder):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(Constant(), {"strategy": "zero3"}, optimizer={"type": "SGD"})
    engine.save(folder, tag="after")
    engine.close()


# ---- a full disk


def fill_up(folder, ranks, wait):
    """What the save said, and whether training went on."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    engine = penstock.initialize(nn.Linear(64, 64), {"comm": {"timeout_s": 20}})

    def step():
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()

    step()
    engine.save(folder, tag="good")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    try:
        if dist.get_rank() in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                engine.save(folder, tag="bad", wait=wait)
            except penstock.RuntimeFault as error:
                said.append(str(error))
            step()
            step()
        said += [str(one.message) for one in caught if "not saved" in str(one.message)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    names = sorted(p.name for p in pathlib.Path(folder).iterdir())
    step()
    engine.save(folder, tag="again")
    assert engine.load(folder) is None
    engine.load(folder, "good")
    engine.close()
    return said, names


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_a_full_disk_is_said_once_and_training_goes_on(ranks, wait, pools, tmp_path):
    for said, names in pools(2).run(fill_up, str(tmp_path), ranks, wait):
        (text,) = said
        assert re.search(rf"rank {ranks[0]}: .*cannot write \".*bad.*wanted, .* free\)", text), text
        assert names == ["good", "latest"]


# ---- behind training's back

LARGE, LAYERS = 1024, 12  # so much that an update comes before the save has written it


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(LARGE, LARGE, bias=False) for _ in range(LAYERS)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self):
        return sum(layer.weight.sum() for layer in self.layers)


SGD = {"type": "SGD", "lr": 0.5, "momentum": 0.5}


def save_and_train_on(config, folder):
    """A checkpoint after every other step; training does not wait for it."""
    import penstock  # noqa: PLC0415

    own = config.pop("own", False)
    given = (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, nesterov=True)) if own else SGD
    engine = penstock.initialize(Large(), config, optimizer=given)
    for step in range(1, 4):
        engine.backward(engine())
        engine.step()
        engine.save(folder, tag=str(step), wait=False)
        engine.backward(engine())  # the update of this one meets the save
        engine.step()
    engine.close()


BEHIND = {
    "ddp": {"strategy": "ddp"},
    "zero1-bf16": {"strategy": "zero1", "precision": "bf16"},
    "zero3": {"strategy": "zero3"},
    "zero3-host-late": {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "host", "params": "host", "late_update": True},
    },
    "zero2-bf16-disk": {
        "strategy": "zero2",
        "precision": "bf16",
        "offload": {"optimizer": "disk", "window_bytes": "8MiB"},
    },
    "zero3-disk": {"strategy": "zero3", "offload": {"optimizer": "disk", "params": "disk"}},
    "own": {"strategy": "zero3", "own": True},
}


@pytest.mark.parametrize("case", BEHIND)
def test_a_save_is_of_one_moment(case, pools, tmp_path):
    config = dict(BEHIND[case])
    if "disk" in case:
        config["offload"] = config["offload"] | {"path": str(tmp_path)}
    pools(2).run(save_and_train_on, config, str(tmp_path / "ck"))
    seen = []
    for step in range(1, 4):
        tensors = checkpoints.tensors_of(tmp_path / "ck" / str(step))
        weights = [v for k, v in tensors.items() if k.startswith("param/")]
        momenta = [v for k, v in tensors.items() if "momentum" in k]
        assert len(weights) == len(momenta) == LAYERS
        for one in (weights, momenta):
            (value,) = {float(x) for w in one for x in (w.min(), w.max())}
            seen.append(value)
    assert len(set(seen[::2])) == 3  # each of another moment
