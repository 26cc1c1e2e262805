"""Which ranks of this machine have reached the rendezvous store.

A rank that calls `init_process_group` connects to the store and blocks until all ranks have.
At that time it has no engine, so `penstock status` cannot read its position. The kernel's tables of
connections (/proc/PID/net/tcp) show which ranks have connected, even if a rank hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.launch.proc import PROC, descendants

_ESTABLISHED = "01"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A rank and whether it has connected to its store.

    Attributes:
        store: address of the store, "host:port".
    """

    rank: int
    world: int
    pid: int
    store: str
    connected: bool


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
        return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)
    return {}


def _sockets(pid: int) -> set[str]:
    """Returns the inodes of the process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                link = os.readlink(entry)
                if link.startswith("socket:["):
                    found.add(link[len("socket:[") : -1])
    return found


def _is_connected(pid: int, port: int) -> bool:
    """Whether a socket of the process is connected to this port."""
    own = _sockets(pid)
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                to_port = int(words[2].rpartition(":")[2], 16)
                if words[3] == _ESTABLISHED and to_port == port and words[9] in own:
                    return True
    return False


def look(pids: Iterable[int]) -> list[Arrival]:
    """Returns the ranks among these processes, in order of rank.

    A rank is a process with the variables RANK, WORLD_SIZE and MASTER_PORT. If several processes
    have the same rank (a shell and its child), the rank has connected if one of them has.
    """
    found: dict[tuple[str, int], Arrival] = {}
    for pid in pids:
        env = _environment(pid)
        try:
            rank, world, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except (KeyError, ValueError):
            continue
        store = f"{env.get('MASTER_ADDR', '')}:{port}"
        known = found.get((store, rank))
        if known is None or not known.connected:
            found[store, rank] = Arrival(rank, world, pid, store, _is_connected(pid, port))
    return sorted(found.values(), key=lambda one: (one.store, one.rank))


def _names(ranks: Sequence[Arrival]) -> str:
    names = ", ".join(f"{one.rank} (process {one.pid})" for one in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"


def sentence(arrivals: Sequence[Arrival]) -> str:
    """Returns a sentence for the ranks of one store: which ranks wait for which. Returns "" if no
    rank waits on this machine.

    A rank waits if it has connected to the store and some other rank has not.
    """
    there = [one for one in arrivals if one.connected]
    missing = [one for one in arrivals if not one.connected]
    if not there or not missing:
        return ""
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{_names(missing)} {verb} not reached init_process_group (no connection to the store "
        f"{missing[0].store}); {_names(there)} {'waits' if len(there) == 1 else 'wait'} there"
    )


def sentences(pids: Iterable[int]) -> list[str]:
    """Returns sentence() of each store."""
    stores: dict[str, list[Arrival]] = {}
    for one in look(pids):
        stores.setdefault(one.store, []).append(one)
    return [text for arrivals in stores.values() if (text := sentence(arrivals))]


@contextlib.contextmanager
def watched(pids: Sequence[int], say: Callable[[str], None], each_s: float) -> Iterator[None]:
    """While the context is open, reports every `each_s` seconds which ranks have not arrived.

    It reports each text once, and stops after all ranks have arrived.
    """
    over = threading.Event()

    def watch() -> None:
        said = ""
        while not over.wait(each_s):
            arrivals = look(one for pid in pids for one in descendants(pid))
            text = sentence(arrivals)
            if text and text != said:
                say(text)
            said = text
            if arrivals and all(one.connected for one in arrivals):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
