"""Free TCP ports of this machine, for tests whose processes listen a moment later."""

from __future__ import annotations

import pathlib
import random
import socket

# From here on the kernel gives ports to outgoing connections and to binds to port 0. Below it, only
# who asks for a port gets it, so that a port stays free unless two tests draw the same one.
_FIRST = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_PORTS = range(max(1024, _FIRST - 12000), _FIRST)


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens, drawn at random: pytest's workers draw at once."""
    free = []
    for port in random.SystemRandom().sample(_PORTS, min(len(_PORTS), 100 * count)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"this machine has no {count} free ports in {_PORTS}")


def free_port() -> int:
    return free_ports(1)[0]
