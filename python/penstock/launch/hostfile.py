"""Reads hostfiles (`name slots=N`, the format of MPI and DeepSpeed) and filters their slots."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from penstock.launch.layout import LARGEST, Node, Slots, parse_number

DEFAULT = "/job/hostfile"
_ENTRY = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)\Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*\Z")
_GRAMMAR = (
    f"allowed are `NAME slots=N` with N from 1 to {LARGEST}, empty lines, and comments after #"
)


@dataclasses.dataclass(frozen=True)
class Host:
    """One entry of a hostfile, with its position (FILE:LINE)."""

    name: str
    slots: int
    where: str


def read_hostfile(path: str) -> list[Host]:
    """Returns the hosts in the order of the file.

    Raises ValueError, with file and line, if the file cannot be read or has a wrong entry.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"[launch::hostfile] cannot read the hostfile {path}: {error}") from None
    return parse_hostfile(lines, path)


def parse_hostfile(lines: Sequence[str], path: str) -> list[Host]:
    """Returns the hosts in these lines of a file. Raises ValueError, as read_hostfile()."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host = _entry(text, f"{path}:{number}")
        if host.name in hosts:
            raise ValueError(
                f"[launch::hostfile] {host.where}: {host.name} was already listed in "
                f"{hosts[host.name].where}; name each host once, with all its slots"
            )
        hosts[host.name] = host
    if not hosts:
        raise ValueError(f"[launch::hostfile] {path} has no host; {_GRAMMAR}")
    return list(hosts.values())


def _entry(text: str, where: str) -> Host:
    match = _ENTRY.match(text)
    slots = parse_number(match["slots"]) if match else None
    if match is None or not slots:
        raise ValueError(f"[launch::hostfile] {where}: {text!r} is not an entry; {_GRAMMAR}")
    if not _NAME.match(match["name"]):
        raise ValueError(
            f"[launch::hostfile] {where}: {match['name']!r} is not a host name; allowed are "
            f"letters, digits and . _ : @ - after a letter or digit"
        )
    return Host(match["name"], slots, where)


def select(hosts: Sequence[Host], include: str, exclude: str) -> list[Node]:
    """Returns the slots that --include names, or all slots except those that --exclude names.

    A filter consists of NAME[:SLOT,...] parts joined by @. A name alone means all slots of that
    host. Several parts may name slots of one host. Nodes are in the order of `hosts`.

    Raises ValueError if both filters are given, a name or slot is unknown, a list of slots is
    empty, a part has two meanings, or no slot is left.
    """
    nodes = kept(hosts, include, exclude)
    if not nodes:
        raise ValueError(
            f"[launch::select] --exclude {exclude} leaves no slot of any host; exclude fewer slots"
        )
    return nodes


def kept(hosts: Sequence[Host], include: str, exclude: str) -> list[Node]:
    """Like select(), but the result may be empty."""
    if include and exclude:
        raise ValueError("[launch::select] --include and --exclude are both given: give only one")
    named = _parse(include or exclude, {host.name: host for host in hosts}, bool(include))
    nodes = []
    for host in hosts:
        every = set(range(host.slots))
        slots = named.get(host.name, set()) if include else every - named.get(host.name, set())
        if slots:
            nodes.append(Node(host.name, tuple(sorted(slots))))
    return nodes


def _parse(text: str, hosts: dict[str, Host], included: bool) -> dict[str, set[int]]:
    """Returns the slots in a filter by host name."""
    where = f"[launch::select] {'--include' if included else '--exclude'} {text}"
    named: dict[str, set[int]] = {}
    alone: dict[str, bool] = {}  # whether a part names the host without slots
    for spec in _specs(text, hosts) if text else []:
        name, listed = _name_and_list(spec, hosts, where)
        if alone.setdefault(name, listed is None) != (listed is None):
            raise ValueError(
                f"{where}: {name} is given both with and without slots; give the host alone for "
                f"all its slots, or only the slots"
            )
        host = hosts[name]
        slots = range(host.slots) if listed is None else _slots(listed, host, where)
        named.setdefault(name, set()).update(slots)
    return named


def _name_and_list(spec: str, hosts: dict[str, Host], where: str) -> tuple[str, str | None]:
    """Splits one part of a filter into a known host name and the text after its colon; None if the
    part has no list of slots."""
    name, colon, listed = spec.rpartition(":")
    if spec in hosts and colon and name in hosts:
        raise ValueError(
            f"{where}: {spec!r} can mean a host or slots of the host {name}; rename one of the two "
            f"hosts in {hosts[spec].where}"
        )
    named = colon != "" and spec not in hosts
    if not named:
        name = spec
    if name not in hosts:
        raise ValueError(f"{where}: there is no host {name!r}; allowed are {', '.join(hosts)}")
    return name, listed if named else None


def _slots(listed: str, host: Host, where: str) -> list[int]:
    """Parses the list of slots after a host name."""
    allowed = f"allowed are 0 to {host.slots - 1} ({host.where})"
    if not listed:
        raise ValueError(
            f"{where}: the list of slots of {host.name} is empty; {allowed}, or {host.name} "
            f"without a colon for all"
        )
    slots = []
    for piece in listed.split(","):
        slot = parse_number(piece)
        if slot is None or slot >= host.slots:
            raise ValueError(f"{where}: no slot {piece!r} on {host.name}; {allowed}")
        slots.append(slot)
    return slots


def _specs(text: str, hosts: dict[str, Host]) -> list[str]:
    """Splits a filter at each @ that is not inside a host name such as user@host."""
    pieces = text.split("@")
    specs = []
    while pieces:
        spec = pieces.pop(0)
        while pieces and spec not in hosts and any(n.startswith(spec + "@") for n in hosts):
            spec += "@" + pieces.pop(0)
        specs.append(spec)
    return specs


def first(hosts: Sequence[Host], num_nodes: int, num_slots: int) -> list[Node]:
    """Returns the first `num_nodes` hosts with the first `num_slots` slots of each; 0 means all.

    Raises ValueError if there are fewer hosts or slots.
    """
    if num_nodes > len(hosts):
        raise ValueError(
            f"[launch::first] --num-nodes {num_nodes}: there are only {len(hosts)} hosts "
            f"({', '.join(host.name for host in hosts)})"
        )
    nodes = []
    for host in hosts[: num_nodes or len(hosts)]:
        if num_slots > host.slots:
            raise ValueError(
                f"[launch::first] --num-gpus {num_slots}: {host.name} has only slots={host.slots} "
                f"({host.where})"
            )
        slots: Slots = tuple(range(num_slots or host.slots))
        nodes.append(Node(host.name, slots))
    return nodes
