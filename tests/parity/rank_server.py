"""Servers that have imported torch, and that fork the rank processes of pools.

Importing torch takes seconds of a processor, forking takes milliseconds. Each interpreter iterates
over sets of strings in an order of its own, and real ranks are separate interpreters. So neighbours
come from different servers, and the tests still notice ranks that depend on such an order. (The
fork server of multiprocessing is one process, with one order.)
"""

from __future__ import annotations

import atexit
import contextlib
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
NUM_SERVERS = 2
WAIT_S = 240.0  # for a server to start, to fork and to end
_CODE = struct.Struct("i")
_NUMBER = struct.Struct("q")
_PR_SET_PDEATHSIG = 1


class Process:
    """A rank's process. Like multiprocessing.Process, but a child of its server, which reports the
    exit code."""

    def __init__(self, pid: int, handle: int, status: socket.socket):
        self.pid = pid
        self._handle = handle  # a pidfd, so that no other process is killed
        self._status = status
        self._code: int | None = None

    def join(self, timeout: float | None = None) -> None:
        if self._code is None and wait([self._status], timeout):
            told = self._status.recv(_CODE.size)
            # Nothing was told: the server died, which killed the rank.
            self._code = _CODE.unpack(told)[0] if told else -signal.SIGKILL
            self._status.close()
            os.close(self._handle)

    @property
    def exitcode(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        self.join(0)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class _Server:
    """This process's end of a server. The server ends with this process at the latest."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(WAIT_S)
        number = theirs.fileno()
        self.process = subprocess.Popen([sys.executable, __file__, str(number)], pass_fds=[number])
        theirs.close()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start(self, rank: bytes, connection: Connection) -> Process:
        status, theirs = socket.socketpair()
        fds = [connection.fileno(), theirs.fileno()]
        socket.send_fds(self._socket, [_NUMBER.pack(len(rank))], fds)
        self._socket.sendall(rank)
        theirs.close()
        told, handles, _, _ = socket.recv_fds(self._socket, _NUMBER.size, 1)
        if len(told) < _NUMBER.size:
            raise ChildProcessError("a server of ranks died")
        return Process(_NUMBER.unpack(told)[0], handles[0], status)


_servers: dict[int, _Server] = {}


@atexit.register
def _stop() -> None:
    for server in _servers.values():
        server.stop()


def start(number: int, target: Callable[..., None], *args: Any) -> tuple[Process, Connection]:
    """Starts a process that runs target(connection, *args), which must be importable. It gets this
    process's folder, import path and environment, but libraries that read the environment when they
    are loaded saw that of the first start. Returns the process and the other end of the connection.
    """
    ours, theirs = multiprocessing.Pipe()
    index = number % NUM_SERVERS
    if index not in _servers or _servers[index].process.poll() is not None:
        _servers[index] = _Server()
    call = pickle.dumps((target, args))
    rank = pickle.dumps((dict(os.environ), os.getcwd(), sys.path, call))
    try:
        process = _servers[index].start(rank, theirs)
    except BaseException:  # the next answer would be that of this request
        _servers[index].process.kill()
        _servers.pop(index).stop()
        raise
    theirs.close()
    return process, ours


# --- In a server.


def _be_rank(rank: bytes, connection: int) -> None:
    import numpy  # noqa: PLC0415 - the servers alone need it

    environment, folder, path, call = pickle.loads(rank)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    numpy.random.seed()  # else that of the server's other ranks
    target, args = pickle.loads(call)
    target(Connection(connection), *args)


def _forked(requests: socket.socket, rank: bytes, fds: list[int], others: list[int]) -> int:
    """Returns the number of the rank's process. Does not return in that process."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)  # it died before the line above
    requests.close()
    for fd in [fds[1], *others]:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _be_rank(rank, fds[0])
    sys.exit()  # through the end of the interpreter, as a process of its own does


def _tell(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody asks any more
        os.write(status, _CODE.pack(code))
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
            header, fds, _, _ = socket.recv_fds(requests, _NUMBER.size, 2)
            if not header:
                return
            size = _NUMBER.unpack(header)[0]
            rank = requests.recv(size, socket.MSG_WAITALL)
            others = [fd for handle, (_, status) in running.items() for fd in (handle, status)]
            pid = _forked(requests, rank, fds, others)
            os.close(fds[0])
            handle = os.pidfd_open(pid)
            running[handle] = (pid, fds[1])
            socket.send_fds(requests, [_NUMBER.pack(pid)], [handle])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # a rank's collections, those at its end too, would copy torch's objects
    _serve(socket.socket(fileno=int(sys.argv[1])))
