"""Two "hosts" on this machine: network namespaces that see only each other, an sshd in each.

Needs root, iproute2 and OpenSSH. File systems and processes are shared; networks, host names in
/etc/hosts and sshd are each host's own.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

HOSTS = ("pst-b", "pst-a")  # not in alphabetical order: ranks follow the hostfile's
ADDRESSES = {"pst-b": "10.231.77.1", "pst-a": "10.231.77.2"}
LINK = "pst0"
_SERVER = """
HostKey {folder}/{host}_key
ListenAddress {address}
PidFile {folder}/{host}.pid
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
"""
_CLIENT = """
IdentityFile {folder}/user_key
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
LogLevel ERROR
"""


def why_not() -> str:
    """Why two hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "ssh", "ssh-keygen", "sshd"):
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
            return f"{program} is not installed"
    probe = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def inside(host: str, *words: str) -> list[str]:
    """The command that runs on a host."""
    return ["ip", "netns", "exec", host, *words]


def _make_networks() -> None:
    for host in HOSTS:
        run("ip", "netns", "add", host)
    first, second = HOSTS
    run(
        *("ip", "link", "add", LINK, "netns", first, "type", "veth"),
        *("peer", "name", LINK, "netns", second),
    )
    for host in HOSTS:
        run("ip", "-n", host, "addr", "add", f"{ADDRESSES[host]}/24", "dev", LINK)
        for link in ("lo", LINK):
            run("ip", "-n", host, "link", "set", link, "up")
        names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        folder = pathlib.Path("/etc/netns") / host
        folder.mkdir(parents=True)
        own = f"{ADDRESSES[host]} {socket.gethostname()}\n"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own}{names}", encoding="ascii")


def _drop_networks(had_netns: bool) -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)
        shutil.rmtree(pathlib.Path("/etc/netns") / host, ignore_errors=True)
    if not had_netns:  # ip made it, as a mount
        subprocess.run(["umount", "/run/netns"], capture_output=True)
    for folder in ("/etc/netns", "/run/netns"):
        with contextlib.suppress(OSError):  # others' are in it
            os.rmdir(folder)


def _wait_for(host: str) -> None:
    """Until its sshd listens."""
    deadline = time.monotonic() + 60
    address = ADDRESSES[host]
    words = inside(host, "bash", "-c", f"exec 3<>/dev/tcp/{address}/22")
    while subprocess.run(words, capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, f"no sshd on {host}"
        time.sleep(0.02)


@contextlib.contextmanager
def two_hosts(folder: pathlib.Path) -> Iterator[str]:
    """The arguments of ssh for reaching them, from inside of one."""
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin") or "sshd"
    separation = pathlib.Path("/run/sshd")
    made, had_netns = not separation.exists(), os.path.exists("/run/netns")
    separation.mkdir(mode=0o755, exist_ok=True)
    for name in ("user_key", *(f"{host}_key" for host in HOSTS)):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    known = ""
    for host in HOSTS:
        known += f"{host} {(folder / f'{host}_key.pub').read_text(encoding='ascii')}"
    (folder / "known_hosts").write_text(known, encoding="ascii")
    (folder / "client").write_text(_CLIENT.format(folder=folder), encoding="ascii")
    servers = []
    try:
        _make_networks()
        for host in HOSTS:
            config = folder / f"{host}_config"
            text = _SERVER.format(folder=folder, host=host, address=ADDRESSES[host])
            config.write_text(text, encoding="ascii")
            words = inside(host, sshd, "-D", "-f", str(config), "-E", str(folder / f"{host}.log"))
            servers.append(subprocess.Popen(words, start_new_session=True))
            _wait_for(host)
        yield f"-F {folder}/client"
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(10)
        _drop_networks(had_netns)
        if made:
            shutil.rmtree(separation, ignore_errors=True)
