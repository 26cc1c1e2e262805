"""Pools of rank processes.

Importing torch takes seconds, so ranks are forked from a server that has it (rank_server.py), and
each runs many functions. The parent hosts the rendezvous store: a rank that dies never takes it
along. Every wait has a deadline, at which the pool kills its own ranks and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import rank_server
import torch
import torch.distributed as dist

_END = b""  # a request that ends a rank


@dataclass
class Failure:
    """An exception that ended a function on one rank."""

    kind: str  # "builtins.ValueError"
    bases: list[str]
    text: str
    trace: str

    def is_a(self, *names: str) -> bool:
        """Whether it is a penstock exception of one of these classes."""
        ours = {base.rpartition(".")[2] for base in self.bases if base.startswith("penstock.")}
        return not ours.isdisjoint(names)


class RankError(AssertionError):
    """A function did not return on every rank."""


class _Parent:
    """The way from a rank to its pool; plain pickle, as multiprocessing would share tensors through
    /dev/shm."""

    connection: Connection | None = None

    @classmethod
    def send(cls, kind: str, value: Any) -> None:
        assert cls.connection is not None
        cls.connection.send_bytes(pickle.dumps((kind, value)))


def note(value: Any) -> None:
    """Called on a rank: tells the pool something before the function ends."""
    _Parent.send("note", value)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _call(request: bytes) -> None:
    try:
        function, args = pickle.loads(request)
        _Parent.send("value", function(*args))
    except BaseException as error:
        bases = [_name(base) for base in type(error).__mro__]
        trace = traceback.format_exc()
        _Parent.send("failure", Failure(_name(type(error)), bases, str(error), trace))


def _serve(connection: Connection, rank: int, world: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's
    _Parent.connection = connection
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    note("ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        if request == _END:
            break
        _call(request)
    dist.destroy_process_group()


# A pool whose largest rank has more resident memory ends before the next file of tests: the workers
# of pytest keep several pools each, and 24 GiB must hold all of them.
_MOST_RESIDENT = 600 << 20


class Pool:
    """`world` ranks with a default gloo group. Used by one thread."""

    def __init__(self, world: int):
        self.world = world
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=240)
        )
        self.connections: list[Connection] = []
        self.processes: list[rank_server.Process] = []
        for rank in range(world):
            process, ours = rank_server.start(rank, _serve, rank, world, self.store.port)
            self.connections.append(ours)
            self.processes.append(process)
        self.notes("ready", timeout=240)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begins function(*args), which must be importable, on every rank."""
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((function, args)))

    def _receive(self, ranks: set[int], kinds: tuple[str, ...], timeout: float) -> dict[int, Any]:
        """One message of `kinds` from each rank in `ranks`; those that died or are late are left
        out. Messages of other kinds are dropped."""
        deadline = time.monotonic() + timeout
        waiting = {self.connections[rank]: rank for rank in ranks}
        got: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return got
            for connection in ready:
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del waiting[connection]
                    continue
                if kind in kinds:
                    got[waiting.pop(connection)] = value
        return got

    def notes(self, expected: Any, timeout: float) -> None:
        """Waits until every rank has sent this note."""
        ranks = set(range(self.world))
        got = self._receive(ranks, ("note", "failure"), timeout)
        wrong = {rank: got.get(rank, "nothing") for rank in ranks if got.get(rank) != expected}
        if wrong:
            self.kill()
            raise RankError(f"waited {timeout} s for {expected!r} from all ranks, got {wrong}")

    def outcomes(self, ranks: set[int], timeout: float) -> dict[int, Any]:
        """What the function returned, or a Failure, by rank; a rank that died or has not ended when
        the time is up is missing."""
        return self._receive(ranks, ("value", "failure"), timeout)

    def attempt(self, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        """Runs the function on all ranks; what it returned, or a Failure, by rank."""
        self.start(function, *args)
        got = self.outcomes(set(range(self.world)), timeout)
        missing = set(range(self.world)) - set(got)
        if missing:
            failures = {rank: v for rank, v in got.items() if isinstance(v, Failure)}
            exits = {rank: self.processes[rank].exitcode for rank in missing}
            self.kill()
            raise RankError(
                f"no outcome within {timeout} s (rank: exit code) {exits}\n{_told(failures)}"
            )
        return [got[rank] for rank in range(self.world)]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        """Runs the function on all ranks; what it returned, by rank. Raises with all traces if any
        rank failed; the pool is then used up."""
        outcomes = self.attempt(function, *args, timeout=timeout)
        failures = {rank: v for rank, v in enumerate(outcomes) if isinstance(v, Failure)}
        if failures:
            self.kill()
            raise RankError(_told(failures))
        return outcomes

    def resident(self) -> int:
        """Bytes of resident memory of the largest rank."""
        most = 0
        for process in self.processes:
            with contextlib.suppress(OSError):  # it has just ended
                pages = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1]
                most = max(most, int(pages) * os.sysconf("SC_PAGE_SIZE"))
        return most

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self, timeout: float = 120) -> list[int | None]:
        """Ends the ranks; their exit codes. A rank that is not gone in time is killed."""
        for connection in self.connections:
            try:
                connection.send_bytes(_END)
            except OSError:
                pass  # it is dead already
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()


def _told(failures: dict[int, Failure]) -> str:
    """All texts, and the first rank's trace."""
    lines = [f"rank {rank}: {failure.kind}: {failure.text}" for rank, failure in failures.items()]
    return "\n".join(lines + [failure.trace for failure in list(failures.values())[:1]])


class Pools:
    """The pools of a test session, one for each world size, started on first use and again after a
    failure."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self.pools or not self.pools[world].alive:
            self.pools[world] = Pool(world)
        return self.pools[world]

    def end_large(self) -> None:
        """Ends pools whose ranks have grown. The next call starts new ones."""
        for world, pool in self.pools.items():
            if not pool.alive or pool.resident() <= _MOST_RESIDENT:
                continue
            codes = pool.close()
            assert all(code == 0 for code in codes), f"{world} ranks did not end by 0: {codes}"

    def close(self) -> dict[int, list[int | None]]:
        """Ends all pools that are in use; exit codes by world size."""
        return {world: pool.close() for world, pool in self.pools.items() if pool.alive}
