"""Child processes that start and end together: ranks, or the launchers of nodes.

Each child runs in its own session. A failure of one child, a signal to the launcher or the death
of the launcher ends all of them. Must be used from the main thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from penstock.launch.layout import Slots

_TAIL_LINES = 40

# A child runs this first. It asks the kernel for a signal when the launcher dies (PR_SET_PDEATHSIG
# = 1, kept across exec), checks that the launcher is still alive, and then execs the command. A
# preexec_fn could do the same but is unsafe, since the store has threads. Arguments: the launcher's
# process id, the signal, the index of --local_rank=N in the command (0: none), the cores of each
# local rank, the command.
BOOTSTRAP = """
import ctypes, os, sys
parent, signum, place = map(int, sys.argv[1:4])
cores, command, rank = sys.argv[4], sys.argv[5:], os.environ.get("LOCAL_RANK", "0")
ctypes.CDLL(None).prctl(1, signum, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
if cores:
    os.sched_setaffinity(0, map(int, cores.split(":")[int(rank)].split(",")))
if place:
    command.insert(place, "--local_rank=" + rank)
try:
    os.execvp(command[0], command)
except OSError as error:
    print(command[0] + ": " + error.strerror, file=sys.stderr)
    os._exit(127)
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """A process to start."""

    name: str  # "rank 3"
    argv: Sequence[str]
    env: Mapping[str, str]
    prefix: bytes = b""  # precedes each copied line of stderr
    # "inherit": the launcher's stdout; "stdout", "stderr": copied to this stream of the launcher.
    stdout: str = "inherit"
    pipe_stderr: bool = True  # stderr is copied; else it is the launcher's stderr
    prefix_stdout: bytes = b""  # precedes each copied line of stdout
    log: str = ""  # file to which both streams are written instead
    # The process gets an open stdin and must end when it closes. The launcher closes stdin to stop
    # the process; the launcher's death also closes it.
    ends_with_stdin: bool = False
    death_signal: signal.Signals = signal.SIGKILL
    local_rank_at: int = 0
    cores: Sequence[Slots] = ()  # cores of each local rank


def first_stdout(num_tasks: int) -> str:
    """Returns Task.stdout for the first task; the other tasks use "stderr".

    The first task inherits the launcher's stdout. If the launcher's stdout and stderr are the same
    terminal or file, the task's output is copied in whole lines instead, so that lines of
    different tasks do not mix.
    """
    return "stdout" if num_tasks > 1 and _is_one_file(1, 2) else "inherit"


def _is_one_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # one of them is closed
        return False


def bootstrap(death_signal: int, local_rank_at: int, cores: Sequence[Slots]) -> list[str]:
    """Returns the arguments of Python that run BOOTSTRAP; the command follows them."""
    text = ":".join(",".join(map(str, one)) for one in cores)
    numbers = (os.getpid(), int(death_signal), local_rank_at)
    return ["-I", "-S", "-c", BOOTSTRAP, *map(str, numbers), text]


class Child:
    """A running task.

    Only the main thread signals and reaps the process, so its id cannot belong to a different
    process.
    """

    def __init__(self, task: Task):
        self.name = task.name
        self.returncode: int | None = None  # negative: the signal that killed it
        self.peak_bytes = 0
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self._task = task
        first = bootstrap(task.death_signal, task.local_rank_at, task.cores)
        self._process = subprocess.Popen(
            [sys.executable, *first, *task.argv],
            env=task.env,
            stdin=subprocess.PIPE if task.ends_with_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if task.stdout != "inherit" or task.log else None,
            stderr=subprocess.PIPE if task.pipe_stderr or task.log else None,
            start_new_session=True,
        )
        self._pumps: list[threading.Thread] = []

    def watch(self, events: Events) -> None:
        """Starts threads that copy its output and put the child in `events` when it ends."""

        def wait() -> None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            events.put(self)

        log = _open_log(self._task.log) if self._task.log else None
        on_stdout = self._task.stdout == "stdout"
        for source, copy, tail in (
            (self._process.stdout, _Copy(self._task.prefix_stdout, on_stdout), None),
            (self._process.stderr, _Copy(self._task.prefix, False), self.tail),
        ):
            if source is not None:
                out = log or copy
                pump = threading.Thread(target=_pump, args=(source, out, tail), daemon=True)
                pump.start()
                self._pumps.append(pump)
        threading.Thread(target=wait, daemon=True).start()

    def kill(self, signum: int) -> None:
        """Signals the process group of the child. The group id stays valid until reap()."""
        if self.returncode is not None:
            return
        if self._process.stdin is not None and signum == signal.SIGTERM:
            self._process.stdin.close()
        else:
            os.killpg(self._process.pid, signum)

    def reap(self) -> None:
        """Waits for the process and kills the remaining processes of its group."""
        self.kill(signal.SIGKILL)
        _, status, usage = os.wait4(self._process.pid, 0)
        self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = usage.ru_maxrss * 1024
        if self._process.stdin is not None:
            self._process.stdin.close()
        for pump in self._pumps:
            pump.join(timeout=2.0)  # a process in another session may still hold the pipe

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + signal if the process was killed."""
        code = self.returncode or 0
        return code if code >= 0 else 128 - code

    def failure(self) -> str:
        """Returns one line that describes how the process ended."""
        code = self.returncode or 0
        if code > 0:
            return f"{self.name} failed first, with exit code {code}"
        text = (
            f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name}); "
            f"its peak memory was {self.peak_bytes / 2**30:.2f} GiB"
        )
        if -code == signal.SIGKILL:
            text += " (from outside: often the kernel when memory runs out, see dmesg)"
        return text


# An ended child, the number of a received signal, or the text of another node's failure.
Events = queue.SimpleQueue[Child | int | str]


class _Copy:
    """Writes to the launcher's stderr or stdout, with a prefix before each line."""

    def __init__(self, prefix: bytes, on_stdout: bool):
        self._prefix, self._on_stdout = prefix, on_stdout

    def write(self, pieces: Sequence[bytes]) -> None:
        out = sys.stdout.buffer if self._on_stdout else sys.stderr.buffer
        # A closed stream must not stop the draining: the rank would block on a full pipe.
        with contextlib.suppress(OSError):
            out.write(b"".join(self._prefix + piece for piece in pieces))
            out.flush()


class _File:
    """A log file for both streams of a rank."""

    def __init__(self, path: str):
        self._file = open(path, "ab", buffering=0)

    def write(self, pieces: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not block the rank either
            self._file.write(b"".join(pieces))


def _open_log(path: str) -> _File:
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    return _File(path)


def _pump(source: IO[bytes], out: _Copy | _File, tail: collections.deque[bytes] | None) -> None:
    """Copies output line by line. A carriage return also ends a line."""
    pending = b""
    with source:
        while True:
            chunk = os.read(source.fileno(), 1 << 16)
            pieces = (pending + chunk).splitlines(keepends=True)
            ended = not pieces or pieces[-1].endswith((b"\n", b"\r"))
            if not ended and not chunk:  # the process ended in the middle of a line
                pieces[-1] += b"\n"
            pending = b"" if ended or not chunk else pieces.pop()
            if tail is not None:
                tail.extend(piece for piece in pieces if not piece.endswith(b"\r"))
            out.write(pieces)
            if not chunk:
                return
