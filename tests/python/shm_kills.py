"""python shm_kills.py ROUNDS SEED: ranks over the back end "penstock", one of which is killed.

torch is imported once and each round's ranks are forked, so that a round is short. Prints what was
wrong, nothing where all is well.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from penstock.front import shm_group

LIMIT = datetime.timedelta(seconds=60)  # of a wait for a peer
SOON_S = 25.0  # in which the others have to end, far below that
MEET_S = 3.0  # in which ranks that all live have long met
ENDED_BY_ERROR = 3


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def train_for_ever(path: str, rank: int, size: int) -> None:
    """What a rank does until a peer is lost."""
    store = dist.FileStore(path, size)
    backend = shm_group.make(store, rank, size, LIMIT)
    small, large = torch.ones(10), torch.ones(300_000, dtype=torch.bfloat16)
    parts = torch.empty(size * 1000)
    while True:
        backend.allreduce(small).wait()
        backend.allreduce(large).wait()
        backend._allgather_base(parts, parts[:1000].clone()).wait()
        if size == 2 and rank == 0:
            backend.send([large], 1, 5).wait()
        elif size == 2:
            backend.recv([large], 0, 5).wait()


def start(path: str, rank: int, size: int) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        train_for_ever(path, rank, size)
    except RuntimeError:
        code = ENDED_BY_ERROR
    finally:
        os._exit(code)


def has_met(pid: int) -> bool:
    """Whether a rank knows its peers: a thread watches them."""
    return len(os.listdir(f"/proc/{pid}/task")) > 1


def status_of(pid: int) -> int | None:
    """How a process ends; None where it does not in time. One that still waits for the killed rank
    to come at all knows of no process: it would wait for the limit, and ends here."""
    begin = time.monotonic()
    while time.monotonic() < begin + SOON_S:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == pid:
            return status
        if time.monotonic() > begin + MEET_S and not has_met(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return ENDED_BY_ERROR << 8
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def play(seed: int) -> str:
    """One round; what was wrong."""
    chance = random.Random(seed)
    size = chance.choice((2, 3))
    before = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        pids = [start(str(pathlib.Path(folder) / "store"), rank, size) for rank in range(size)]
        time.sleep(chance.uniform(0.0, 0.25))  # the moment is what is tested
        victim = pids.pop(chance.randrange(size))
        early = os.waitpid(victim, os.WNOHANG)[0] != 0
        os.kill(victim, signal.SIGKILL)
        if not early:
            os.waitpid(victim, 0)
        statuses = {pid: status_of(pid) for pid in pids}
        left = {name for name in shared_memory() - before if name.startswith("penstock")}
    wrong = {pid: s for pid, s in statuses.items() if s != ENDED_BY_ERROR << 8}
    problems = ["a rank ended before the kill"] * early
    problems += [f"statuses {wrong} of the others of {size}"] * bool(wrong)
    problems += [f"left {left}"] * bool(left)
    return "; ".join(problems)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = int(sys.argv[2])
    for number in range(first, first + int(sys.argv[1])):
        wrong = play(number)
        if wrong:
            print(f"round {number}: {wrong}")
