"""Servers that have imported torch, and that fork the rank processes of pools.

Importing torch takes seconds of a processor, forking takes milliseconds. Each interpreter iterates
over sets of strings in an order of its own, and real ranks are separate interpreters. So neighbours
come from different servers, and the tests still notice ranks that depend on such an order.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = ("torch", "torch.distributed", "numpy", "penstock")
SERVERS = 2
_CODE = struct.Struct("i")
_PID = struct.Struct("q")
_PR_SET_PDEATHSIG = 1


class Process:
    """A rank; as multiprocessing.Process, but a child of its server, which tells its exit code."""

    def __init__(self, pid: int, status: socket.socket):
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def join(self, timeout: float | None = None) -> None:
        if self._code is None and wait([self._status], timeout):
            told = self._status.recv(_CODE.size)
            # Nothing was told: the server died, which killed the rank.
            self._code = _CODE.unpack(told)[0] if told else -signal.SIGKILL
            self._status.close()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        self.join(0)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The way to a server, which ends when this process does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        number = theirs.fileno()
        self.process = subprocess.Popen([sys.executable, __file__, str(number)], pass_fds=[number])
        theirs.close()

    def stop(self) -> None:
        self._socket.close()
        self.process.wait()

    def start(self, rank: bytes, connection: Connection) -> Process:
        status, theirs = socket.socketpair()
        header = struct.pack("q", len(rank))
        socket.send_fds(self._socket, [header], [connection.fileno(), theirs.fileno()])
        self._socket.sendall(rank)
        theirs.close()
        told = self._socket.recv(_PID.size, socket.MSG_WAITALL)
        assert len(told) == _PID.size, "a server of ranks died"
        return Process(_PID.unpack(told)[0], status)


_servers: dict[int, _Server] = {}


@atexit.register
def _stop() -> None:
    for server in _servers.values():
        server.stop()


def start(number: int, target: Callable[..., None], *args: Any) -> tuple[Process, Connection]:
    """Runs target(connection, *args), which must be importable, in a process with this one's
    environment, folder and import path; the other end of the connection."""
    ours, theirs = multiprocessing.Pipe()
    server = number % SERVERS
    if server not in _servers or _servers[server].process.poll() is not None:
        _servers[server] = _Server()
    call = pickle.dumps((target, args))
    rank = pickle.dumps((dict(os.environ), os.getcwd(), sys.path, call))
    process = _servers[server].start(rank, theirs)
    theirs.close()
    return process, ours


# --- In a server.


def _be_rank(server: int, rank: bytes, connection: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return  # it died before the line above
    environment, folder, path, call = pickle.loads(rank)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    target, args = pickle.loads(call)
    target(Connection(connection), *args)


def _forked(requests: socket.socket, rank: bytes, fds: list[int], others: list[int]) -> int:
    """The number of the rank's process; does not return in that process."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    requests.close()
    for fd in [fds[1], *others]:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _be_rank(server, rank, fds[0])
    sys.exit()  # through the end of an interpreter, as a process of its own


def _tell(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.write(status, _CODE.pack(code))
    except OSError:
        pass  # nobody asks any more
    os.close(status)


def _serve(requests: socket.socket) -> None:
    running: dict[int, tuple[int, int]] = {}  # by pidfd: process, status
    while True:
        ready = wait([requests, *running])
        for fd in ready:
            if fd is not requests:
                _tell(*running.pop(fd))
                os.close(fd)
        if requests in ready:
            header, fds, _, _ = socket.recv_fds(requests, _PID.size, 2)
            if not header:
                return
            size = _PID.unpack(header)[0]
            rank = requests.recv(size, socket.MSG_WAITALL)
            others = [fd for one in running.items() for fd in (one[0], one[1][1])]
            pid = _forked(requests, rank, fds, others)
            os.close(fds[0])
            running[os.pidfd_open(pid)] = (pid, fds[1])
            requests.sendall(_PID.pack(pid))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # a rank's collections, those at its end too, would copy torch's objects
    _serve(socket.socket(fileno=int(sys.argv[1])))
