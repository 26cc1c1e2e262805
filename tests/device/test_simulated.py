"""The simulated accelerator itself: it must be right where the program is, and find where not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the simulated accelerator is a device of torch")

import device_cases
import device_collectives
import device_ordering
import ranks
import sim
import torch
from device_model import Training

SEEDS = 20


@pytest.fixture(scope="module")
def started():
    """Pools of their own: a process that has loaded the device is of no use to other tests."""
    pools = ranks.Pools()
    yield pools
    codes = pools.close()
    assert all(code == 0 for exits in codes.values() for code in exits), codes


@pytest.fixture
def alone(started):
    """A process that has the device."""
    pool = started(1)
    pool.run(sim.start)
    return pool


@pytest.fixture
def pair(started):
    """Two ranks, each with the device."""
    pool = started(2)
    pool.run(sim.start)
    pool.run(device_collectives.meet, pool.store.port)
    return pool


@pytest.mark.parametrize("delay_us", (0, 100))
@pytest.mark.parametrize(
    "case",
    (
        Training(optimizer={"foreach": True}),
        Training(optimizer={"fused": True}, dropout=0.1),
        Training(dropout=0.1, reentrant=True),
        Training(dropout=0.1, reentrant=False),
    ),
    ids=("foreach", "fused-dropout", "checkpoint-reentrant", "checkpoint"),
)
def test_trains_as_the_cpu(alone, case, delay_us):
    alone.run(device_cases.trains_as_the_cpu, case, delay_us)


@pytest.mark.parametrize("case", device_cases.CASES, ids=lambda case: case.__name__)
def test_case(alone, case):
    alone.run(case)


def test_the_right_engine_is_right(alone):
    assert alone.run(device_ordering.seeds_that_find, None, 3 * SEEDS) == [[]]


@pytest.mark.parametrize("left_out", device_ordering.LEFT_OUT)
def test_finds_a_left_out_synchronization(alone, left_out):
    [found] = alone.run(device_ordering.seeds_that_find, left_out, SEEDS)
    assert found


@pytest.mark.parametrize("seed", range(2))
def test_collectives(pair, seed):
    pair.run(device_collectives.collectives, seed)


@pytest.mark.parametrize(
    "case",
    (
        device_collectives.issue_returns_before_it_is_done,
        device_collectives.groups,
        device_collectives.synchronous,
        device_collectives.connects_lazily,
        device_collectives.refuses_two_ranks_on_a_device,
        device_collectives.trained_with_ddp,
        device_collectives.trained_with_fsdp2,
    ),
    ids=lambda case: case.__name__,
)
def test_on_two_ranks(pair, case):
    pair.run(case)


def test_finds_launches_in_another_order(pair):
    assert pair.run(device_collectives.finds_another_order) == [[True, False]] * 2


def test_finds_a_collective_that_nobody_waits_for(pair):
    assert sum(pair.run(device_collectives.reads_without_waiting)) > 0


def ended(script: str) -> tuple[int, str]:
    """Exit code and output of a program that has the device."""
    folder = device_cases.__file__.rpartition("/")[0]
    setup = f"import sys; sys.path.insert(0, {folder!r}); import sim, torch; sim.start()\n"
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    # From Python 3.12 on there is a warning of forks beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", limits + setup + script]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return process.returncode, process.stdout + process.stderr


def test_host_access_ends_the_process():
    """Also while a kernel uses the memory."""
    code, text = ended(
        "import ctypes\n"
        "x = torch.ones(1 << 20, device='sim')\n"
        "print('here', flush=True)\n"
        "y = [x.exp() for _ in range(20)]\n"
        "ctypes.string_at(x.data_ptr(), 1)\n"
    )
    assert (code, text) == (-signal.SIGSEGV, "here\n")


def test_processes_end():
    """With work in the queues, an error that nobody has seen, and a forked child."""
    code, text = ended(
        "import os, threading\n"
        "x = torch.ones(10, device='sim')\n"
        "torch.accelerator.synchronize()\n"  # a kernel may hold a lock; the child could not take it
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: x.add_(1)\n"
        "    except RuntimeError as error: print(str(error).splitlines()[0], flush=True)\n"
        "    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "x.index_select(0, torch.tensor([99], device='sim'))\n"
        "def work():\n"
        "    torch.accelerator.set_stream(torch.Stream('sim'))\n"
        "    for _ in range(100): x.add_(1)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()\n"
        "sim.set_delays_us(0, 50)\n"
        "for _ in range(100): x.mul_(1)\n"
    )
    assert code == 0, text
    assert text == "[sim] the device cannot be used in a forked process\n3\n"


def test_this_process_has_no_device():
    """Of other tests some would do something else beside one: torch starts as many workers as there
    are devices, DataParallel puts its module there."""
    assert not sim.is_started() and not torch.accelerator.is_available()
