"""Starts the ranks of a run on one node and guarantees that none outlives it.

Each rank is a process of its own session: a failure, a signal to the launcher or the launcher's own
death ends them all. The launcher also hosts the rendezvous store, so the store survives rank 0 and
no port is guessed. Must be called from the main thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

RESUME = "PENSTOCK_RESUME"  # in a rank's environment
_TAIL_LINES = 40
_TERM_S = 5.0  # from SIGTERM to SIGKILL, after a failure
_CONNECT_S = 300.0  # for the other nodes' launchers to appear

# What a child runs first: ask the kernel to kill it when the launcher dies (PR_SET_PDEATHSIG = 1,
# kept across exec), check that this has not happened yet, become the script. A preexec_fn would do
# the same but is unsafe beside the store's threads.
BOOTSTRAP = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable] + sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to start on this node.

    Raises ValueError when the values do not fit each other.
    """

    command: Sequence[str]  # script and its arguments
    nproc: int = 1  # ranks on this node
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""  # HOST:PORT of node 0; needed when nnodes > 1
    grace_s: float = 15.0  # for the other ranks to end by themselves after one failed
    max_restarts: int = 0  # after failures
    resume: str = "auto"  # what engine.load("auto") means: "auto", "never" or a checkpoint
    min_nodes: int = 0  # below nnodes: nodes may come and go (elastic.py)

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError("[launch] --max-restarts must not be negative")
        if self.nproc < 1 or self.nnodes < 1:
            raise ValueError("[launch] --nproc and --nnodes must be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"[launch] --node-rank must be 0 to {self.nnodes - 1}")
        if self.grace_s < 0:
            raise ValueError("[launch] --grace-s must not be negative")
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ValueError("[launch] --nnodes above 1 needs --rdzv-endpoint HOST:PORT of node 0")
        if not self.command or not pathlib.Path(self.command[0]).is_file():
            raise ValueError(f"[launch] no such script: {' '.join(self.command[:1])}")
        self.endpoint()

    def endpoint(self) -> tuple[str, int]:
        """Host and port of the store; port 0 lets the kernel choose (single node only)."""
        if not self.rdzv_endpoint:
            return "127.0.0.1", 0
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"[launch] --rdzv-endpoint {self.rdzv_endpoint!r} is not HOST:PORT")
        return host, int(port)


class _Child:
    """One rank. Signalled and reaped by the main thread only, so its id is never a stranger's."""

    def __init__(self, rank: int, argv: Sequence[str], env: dict[str, str], *, pipe_stdout: bool):
        self.rank = rank
        self.returncode: int | None = None  # negative: the signal that killed it
        self.peak_bytes = 0
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOTSTRAP, str(os.getpid()), *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe_stdout else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._pumps: list[threading.Thread] = []

    def watch(self, events: queue.SimpleQueue[_Child | int], prefix: bytes) -> None:
        """Starts copying its output, and puts the child in `events` once it has ended."""

        def wait() -> None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            events.put(self)

        tails = ((self._process.stdout, None), (self._process.stderr, self.tail))
        for source, tail in tails:
            if source is not None:
                pump = threading.Thread(target=_pump, args=(source, prefix, tail), daemon=True)
                pump.start()
                self._pumps.append(pump)
        threading.Thread(target=wait, daemon=True).start()

    def kill(self, signum: int) -> None:
        """Signals the rank and what it started. Until reaped, the group id stays its own."""
        if self.returncode is None:
            os.killpg(self._process.pid, signum)

    def reap(self) -> None:
        """Collects an ended (or just killed) rank, and kills what it left running."""
        self.kill(signal.SIGKILL)
        _, status, usage = os.wait4(self._process.pid, 0)
        self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = usage.ru_maxrss * 1024
        for pump in self._pumps:
            pump.join(timeout=2.0)  # a process in another session may still hold the pipe

    def failure(self) -> str:
        """One line that says how it ended."""
        code = self.returncode or 0
        if code > 0:
            return f"rank {self.rank} failed first, with exit code {code}"
        text = (
            f"rank {self.rank} was killed by signal {-code} ({signal.Signals(-code).name}); "
            f"its peak memory was {self.peak_bytes / 2**30:.2f} GiB"
        )
        if -code == signal.SIGKILL:
            text += " (from outside: often the kernel when memory runs out, see dmesg)"
        return text


def _pump(source: IO[bytes], prefix: bytes, tail: collections.deque[bytes] | None) -> None:
    """Copies output to our stderr, prefixed; a carriage return ends a piece like a newline does."""
    pending = b""
    with source:
        while True:
            chunk = os.read(source.fileno(), 1 << 16)
            pieces = (pending + chunk).splitlines(keepends=True)
            ended = not pieces or pieces[-1].endswith((b"\n", b"\r"))
            if not ended and not chunk:  # it died in the middle of a line
                pieces[-1] += b"\n"
            pending = b"" if ended or not chunk else pieces.pop()
            if tail is not None:
                tail.extend(piece for piece in pieces if not piece.endswith(b"\r"))
            # A closed stderr must not stop the draining: the rank would block on a full pipe.
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(b"".join(prefix + piece for piece in pieces))
                sys.stderr.buffer.flush()
            if not chunk:
                return


def _environment(options: LaunchOptions, local_rank: int, host: str, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // options.nproc)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    world = {
        "RANK": str(options.node_rank * options.nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(options.nnodes * options.nproc),
        "LOCAL_WORLD_SIZE": str(options.nproc),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// then connects to our store as a client
    }
    return defaults | dict(os.environ) | world | {RESUME: options.resume}


@contextlib.contextmanager
def _rendezvous(options: LaunchOptions) -> Iterator[tuple[str, int]]:
    """Hosts the store on node 0, and keeps it until the other nodes' ranks have ended too."""
    host, port = options.endpoint()
    hosting = options.node_rank == 0
    timeout = datetime.timedelta(seconds=_CONNECT_S)
    store = TCPStore(host, port, is_master=hosting, wait_for_workers=False, timeout=timeout)
    try:
        yield host, store.port
    finally:
        key = "penstock/launch/ended/{}"
        grace = datetime.timedelta(seconds=max(1.0, options.grace_s))
        try:
            if not hosting:
                store.set(key.format(options.node_rank), "")
            elif options.nnodes > 1:
                store.wait([key.format(node) for node in range(1, options.nnodes)], grace)
        except RuntimeError as error:
            _say(f"another node's launcher is gone or late: {str(error).splitlines()[0]}")


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Child | int]) -> Iterator[None]:
    def forward(signum: int, _frame: FrameType | None) -> None:
        events.put(signum)

    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, forward) for signum in taken}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"penstock run: {text}", file=sys.stderr, flush=True)


def _supervise(
    children: Sequence[_Child], events: queue.SimpleQueue[_Child | int], grace_s: float
) -> tuple[_Child | None, int]:
    """Waits for all. Returns the child that failed first, if any, and the signal we got (or 0)."""
    alive = set(children)
    failed: _Child | None = None
    stopped_by = 0
    due: list[tuple[float, int]] = []  # (time, signal) for whoever is still alive then
    while alive:
        try:
            event = events.get(timeout=max(0.0, due[0][0] - time.monotonic()) if due else None)
        except queue.Empty:
            _, signum = due.pop(0)
            for child in alive:
                child.kill(signum)
            continue
        now = time.monotonic()
        if isinstance(event, int):
            again, stopped_by = stopped_by != 0, event
            due = [(now if again else now + max(_TERM_S, grace_s), signal.SIGKILL)]
            if not again:
                due.insert(0, (now, signal.SIGTERM))
            continue
        event.reap()
        alive.discard(event)
        if event.returncode != 0 and failed is None and stopped_by == 0:
            failed = event
            due = [(now + grace_s, signal.SIGTERM), (now + grace_s + _TERM_S, signal.SIGKILL)]
            if alive:
                _say(f"{event.failure()}; the others have {grace_s:g} s to end")
    return failed, stopped_by


def _report(failed: _Child) -> int:
    lines = [piece.decode(errors="replace").rstrip("\n") for piece in failed.tail]
    _say(failed.failure() + (f"; the last {len(lines)} lines it wrote to stderr:" if lines else ""))
    for line in lines:
        print(f"  {line}", file=sys.stderr)
    sys.stderr.flush()
    code = failed.returncode or 0
    return code if code > 0 else 128 - code


def launch(options: LaunchOptions) -> int:
    """Runs the ranks of this node to their end, and again up to `max_restarts` times where one
    failed.

    Returns 0, or the exit code of the rank that failed first (128 + signal when it was killed), or
    128 + signal when the launcher itself was told to stop. The error of the rank that failed first
    is the last thing printed.
    """
    code, stopped = _run_once(options)
    for restart in range(1, options.max_restarts + 1):
        if code == 0 or stopped:
            break
        _say(f"restart {restart} of {options.max_restarts}")
        code, stopped = _run_once(dataclasses.replace(options, resume="auto"))
    return code


def _run_once(options: LaunchOptions) -> tuple[int, bool]:
    """The exit code, and whether the launcher was told to stop."""
    events: queue.SimpleQueue[_Child | int] = queue.SimpleQueue()
    children: list[_Child] = []
    with _rendezvous(options) as (host, port), _signals_to(events):
        try:
            for local_rank in range(options.nproc):
                env = _environment(options, local_rank, host, port)
                rank = int(env["RANK"])
                child = _Child(rank, options.command, env, pipe_stdout=local_rank > 0)
                children.append(child)
                child.watch(events, f"[rank {rank}] ".encode() if options.nproc > 1 else b"")
            failed, stopped_by = _supervise(children, events, options.grace_s)
        finally:
            for child in children:
                if child.returncode is None:
                    child.reap()
    if failed is not None:
        return _report(failed), stopped_by != 0
    if stopped_by:
        _say(f"stopped by {signal.Signals(stopped_by).name}")
        return 128 + stopped_by, True
    return 0, False
