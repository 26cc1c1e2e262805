"""The rendezvous store of launchers and ranks. It also records which rank failed first."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.launch.messages import LOG
from penstock.launch.options import LaunchOptions
from penstock.launch.processes import Events

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CONNECT_S = 300.0  # time limit for the launchers of the nodes to connect
_KEYS = "penstock/launch"
_FIRST = f"{_KEYS}/first"
_WHOLE_RUN = datetime.timedelta(days=3650)


class Meeting:
    """One node's connection to the rendezvous store.

    With several nodes, each node is notified when a rank on another node fails. All nodes then end
    with the exit code of the rank that failed first.
    """

    def __init__(self, options: LaunchOptions, events: Events):
        self.host, port = options.endpoint()
        self._options = options
        self._hosting = options.node_rank == 0
        self._store = self._connect(port, hosting=self._hosting)
        self.port = int(self._store.port)
        self._watch: threading.Thread | None = None
        if options.nnodes > 1:
            self._watch = threading.Thread(target=self._wait, args=(events,), daemon=True)
            self._watch.start()

    def _connect(self, port: int, *, hosting: bool) -> TCPStore:
        timeout = datetime.timedelta(seconds=_CONNECT_S)
        # Imported here, so that `penstock run --help` starts without torch.
        make: type[TCPStore] = importlib.import_module("torch.distributed").TCPStore
        return make(self.host, port, is_master=hosting, wait_for_workers=False, timeout=timeout)

    def _wait(self, events: Events) -> None:
        """Blocks until a node fails or this node's run is over. Puts a failure in `events`."""
        with contextlib.suppress(RuntimeError):  # the store has closed: node 0 ends the run
            store = self._connect(self.port, hosting=False)
            store.wait([f"{_KEYS}/over/{self._options.node_rank}"], _WHOLE_RUN)
            if store.check([_FIRST]):
                events.put(self._first(store)[1])

    @staticmethod
    def _first(store: TCPStore) -> tuple[int, str]:
        code, _, text = store.get(_FIRST).decode().partition(" ")
        return int(code), text

    def fail(self, code: int, text: str) -> None:
        """Reports a failure of this node to all nodes. Only the first report is recorded."""
        if self._options.nnodes == 1:
            return
        with contextlib.suppress(RuntimeError):
            node = self._options.node_rank
            self._store.compare_set(_FIRST, "", f"{code} {text} (node {node})")
            for other in range(self._options.nnodes):
                self._store.set(f"{_KEYS}/over/{other}", "")

    def first_failure(self) -> tuple[int, str] | None:
        """Returns exit code and text of the rank that failed first on any node; None if unknown."""
        with contextlib.suppress(RuntimeError):
            if self._options.nnodes > 1 and self._store.check([_FIRST]):
                return self._first(self._store)
        return None

    def close(self) -> None:
        """Ends this node's part. On node 0, the call waits until the other nodes have ended.

        It waits for at most `grace_s`, but at least one second; the store stays open for that time.
        """
        if self._watch is None:
            return
        key = _KEYS + "/ended/{}"
        grace = datetime.timedelta(seconds=max(1.0, self._options.grace_s))
        try:
            self._store.set(f"{_KEYS}/over/{self._options.node_rank}", "")
            self._watch.join(timeout=1.0)
            if not self._hosting:
                self._store.set(key.format(self._options.node_rank), "")
            else:
                nodes = range(1, self._options.nnodes)
                self._store.wait([key.format(node) for node in nodes], grace)
        except RuntimeError as error:
            LOG.warning(
                f"the launcher of another node has ended or is late: {str(error).splitlines()[0]}"
            )


@contextlib.contextmanager
def rendezvous(options: LaunchOptions, events: Events) -> Iterator[Meeting]:
    """Hosts the store on node 0 and connects to it on the other nodes."""
    meeting = Meeting(options, events)
    try:
        yield meeting
    finally:
        meeting.close()
