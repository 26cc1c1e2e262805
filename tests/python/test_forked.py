"""Forked processes, such as workers of a DataLoader, have copies of engines without their threads.
To free a copy neither waits for these threads nor speaks to other ranks."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

CONFIGS = {
    "zero1": {},
    "zero3": {"strategy": "zero3"},
    "gloo": {"strategy": "zero3", "comm": {"backend": "gloo"}},
    "disk": {"strategy": "zero3", "offload": {"optimizer": "disk"}},
    "host": {"strategy": "hpz_host"},
    "tensor": {
        "mesh": {"tensor": 2},
        "parallel": {"rules": {"first": "column", "second": "row"}},
    },
    "local": {"comm": {"codec": "local", "outer_every": 1}},
}


def ended(child, seconds=30):
    """The child's wait status; it is killed if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hangs"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())


def frees_a_copy(config, folder, how):
    """What a forked process ends with after it has freed its copy of an engine."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    engine = penstock.initialize(Net(), config)

    def step():
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    step()
    if how == "saving":
        engine.save(folder, wait=False)
    keeps = [engine]
    keeps.append(keeps)  # a cycle, which only the garbage collector frees
    gc.disable()
    try:
        if how == "dropped":
            del engine, keeps, step
        child = os.fork()
        if child == 0:
            try:
                if how != "dropped":
                    del engine, keeps, step
                gc.collect()
            finally:
                os._exit(7)
        status = ended(child)
        if how != "dropped":
            assert step() > 0  # this process and the other ranks have lost nothing
            engine.close()
    finally:
        gc.enable()
    gc.collect()
    return status


@pytest.mark.parametrize("how", ["dropped", "alive", "saving"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_copy_is_freed(name, how, pools, tmp_path):
    got = pools(2).run(frees_a_copy, CONFIGS[name], str(tmp_path), how, timeout=120)
    assert got == [7 << 8, 7 << 8]


ENDS = """
import atexit, os, signal, sys
import torch
import penstock

folder = sys.argv[1]
with penstock.init():
    waiting = torch.nn.Linear(4, 4)  # it never gets an engine
    net = torch.nn.Linear(4, 4)
engine = penstock.initialize(
    net,
    {
        "strategy": "zero3",
        "monitor": {"path": folder, "console": "none"},
        "checkpoint": {"path": folder, "signals": ["SIGTERM"]},
    },
)


def step():
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


step()
sys.stdout.flush()
children = []
for how in ("exit", "finally", "step", "signal"):
    child = os.fork()
    if child != 0:
        children.append(child)
        continue
    if how == "exit":
        if os.environ["WORLD_SIZE"] == "1":
            sys.exit(5)  # as a script ends: with atexit, and all modules freed
        atexit._run_exitfuncs()
        os._exit(5)  # torch crashes when a forked process frees a group of its parent
    if how == "finally":
        engine.close()  # as in a `finally:`
        os._exit(6)
    if how == "step":
        try:
            engine.step()
        except penstock.RuntimeFault as error:
            os._exit(7 if "forked" in str(error) else 1)
    signal.raise_signal(signal.SIGTERM)
    os._exit(1)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
step()
engine.close()
print(codes)
"""


@pytest.mark.parametrize("world", [1, 2])
def test_forked_scripts_end(world, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(tmp_path)],
            env=os.environ | {key: str(value) for key, value in (place | {"RANK": rank}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for one in ranks:
            said, errors = one.communicate(timeout=120)
            assert said == f"[5, 6, 7, {-signal.SIGTERM}]\n", errors
    finally:
        for one in ranks:
            one.kill()
            one.wait()


class Collecting(torch.utils.data.Dataset):
    """Its samples are made while the worker's garbage collector runs."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        gc.collect()
        return torch.full((8,), float(index))


def trains_beside_garbage():
    """The mean of all samples that workers made while the rank had an engine that nobody holds."""
    import penstock  # noqa: PLC0415

    for _ in range(2):
        earlier = penstock.initialize(Net(), {"strategy": "zero3"})
        earlier.backward(earlier(torch.ones(2, 8)).sum())
        earlier.step()
        earlier.itself = earlier
        gc.disable()
        del earlier
    loader = torch.utils.data.DataLoader(Collecting(), 4, num_workers=2)
    total = sum(float(batch.sum()) for batch in loader) / (24 * 8)
    gc.enable()
    gc.collect()
    return total


def test_workers_of_a_loader_collect(pools):
    assert pools(2).run(trains_beside_garbage) == [11.5, 11.5]
