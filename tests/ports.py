"""Free TCP ports of this machine, for tests whose processes listen a moment later."""

from __future__ import annotations

import random
import socket

# Linux gives outgoing connections, and binds to port 0, ports from 32768 on. A port below that
# stays free until a test listens on it, however many connections others open meanwhile.
_PORTS = range(20000, 32000)


def free_port() -> int:
    """A port on which nobody listens, drawn at random: the workers of pytest draw at once."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError("100 ports of this machine are all in use")
