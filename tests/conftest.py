"""Options and fixtures shared by tests/python and tests/parity."""

from __future__ import annotations

import os
import pathlib
import re
import sys

import pytest

for folder in (".", "parity", "foreign", "device"):
    sys.path.insert(0, str(pathlib.Path(__file__).parent / folder))

import daily  # noqa: E402 - from the folder of this file

# Ranks meet on this machine; a host name that resolves to nothing must not matter.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# torch's store looks for the name of each peer that connects, in the DNS: a lost answer takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every parity case and every fault")
    parser.addoption("--seeds", help='of tests/parity/fuzz, such as "7" or "0-500"')


def shared_memory():
    """What torch and Penstock left in /dev/shm, but for the files of processes that still run.

    Two workers of pytest run side by side, each with ranks of its own. torch's names have the
    number of the process that made them: `torch_4711_...`.
    """
    folder = pathlib.Path("/dev/shm")
    names = os.listdir(folder) if folder.exists() else []
    ours = {name for name in names if name.startswith(("torch_", "penstock"))}
    return {name for name in ours if not _runs(re.search(r"_(\d+)", name))}


def _runs(number):
    return number is not None and pathlib.Path(f"/proc/{number[1]}").exists()


_pools = []  # those in use


@pytest.fixture(scope="module", autouse=True)
def _small_ranks():
    """Before each file, ends ranks that have grown. A file may keep state in its ranks."""
    for pools in _pools:
        pools.end_large()


def started_pools():
    """pools(world) is a pool of that many ranks. At the end none may be left, or have left
    anything."""
    import ranks  # noqa: PLC0415 - torch is not needed by the tests that do not use this
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # as on the ranks: the models are small
    before = shared_memory()
    pools = ranks.Pools()
    _pools.append(pools)
    yield pools
    _pools.remove(pools)
    codes = pools.close()
    assert all(code == 0 for exits in codes.values() for code in exits), (
        f"ranks did not end by themselves with 0, by world size: {codes}"
    )
    left = shared_memory() - before
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture(scope="session")
def pools():
    yield from started_pools()


@pytest.fixture(scope="session")
def device_pools():
    """Pools for device tests. They are separate, because a process that has loaded the simulated
    device no longer behaves like one with a CPU only. Each rank needs a device of its own, as NCCL
    refuses two ranks on one device."""
    import torch  # noqa: PLC0415 - as in started_pools()

    simulated = os.environ.get("PENSTOCK_TEST_DEVICE", "sim") == "sim"
    for pools in started_pools():

        def pool_of(world, pools=pools):
            if not simulated and world > torch.accelerator.device_count():
                pytest.skip(f"needs {world} devices")
            return pools(world)

        yield pool_of


@pytest.fixture(scope="module")
def drop_in_pools():
    """Of their own: processes in which `import deepspeed` finds ours."""
    yield from started_pools()


@pytest.fixture(scope="module")
def names_of(request):
    """names_of(fixture, CASES): the names of the cases for which this run needs the module's
    fixture, and of those that they are compared with or go on from, in the order of CASES."""

    def of(fixture, cases, *others):
        items = [item for item in request.session.items if item.path == request.path]
        needs = [item for item in items if fixture in item.fixturenames]
        params = [item.callspec.params for item in needs if hasattr(item, "callspec")]
        names = {each.get("case") for each in params}.intersection(cases).union(others)
        while True:
            more = {cases[name].get("as", name) for name in names}
            more |= {cases[name].get("resume", name).partition("/")[0] for name in names}
            if more <= names:
                return [name for name in cases if name in names]
            names |= more

    return of


@pytest.fixture(scope="session")
def largest(request):
    """The largest deviations of the session by name, printed at its end."""
    return request.config.stash.setdefault(request.config.parity_key, {})


def pytest_collection_modifyitems(config, items):
    chosen = any("::" in arg for arg in config.args) or config.getoption("keyword")
    if chosen or config.getoption("full"):
        return
    items[:], left = daily.sample(items)
    if left:
        config.hook.pytest_deselected(items=left)


def pytest_configure(config):
    config.parity_key = pytest.StashKey[dict[str, float]]()


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands its figures to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        found = session.config.stash.get(session.config.parity_key, {})
        session.config.workeroutput["largest"] = {k: float(v) for k, v in found.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    largest = node.config.stash.setdefault(node.config.parity_key, {})
    for name, value in getattr(node, "workeroutput", {}).get("largest", {}).items():
        largest[name] = max(value, largest.get(name, 0.0))


def pytest_terminal_summary(terminalreporter, config):
    largest = config.stash.get(config.parity_key, None)
    if not largest:
        return
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    matrix = ("test_parity[", "test_zoo[")
    count = sum(r.when == "call" and any(name in r.nodeid for name in matrix) for r in reports)
    figures = ", ".join(f"{name} {value:.2g}" for name, value in sorted(largest.items()))
    terminalreporter.write_line(f"parity: {count} cases, largest deviations: {figures}")
