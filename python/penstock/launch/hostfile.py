"""Reads hostfiles (`name slots=N`, the format of MPI and DeepSpeed) and filters their slots."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from penstock.launch.layout import Node, Slots

DEFAULT = "/job/hostfile"
_ENTRY = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)\Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*\Z")
_GRAMMAR = "allowed are `NAME slots=N` with N from 1, empty lines, and comments after #"


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
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"[launch::hostfile] cannot read the hostfile {path}: {error}") from None
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
    if match is None or int(match["slots"]) == 0:
        raise ValueError(f"[launch::hostfile] {where}: {text!r} is not an entry; {_GRAMMAR}")
    if not _NAME.match(match["name"]):
        raise ValueError(
            f"[launch::hostfile] {where}: {match['name']!r} is not a host name; allowed are "
            f"letters, digits and . _ : @ - after a letter or digit"
        )
    return Host(match["name"], int(match["slots"]), where)


def select(hosts: Sequence[Host], include: str, exclude: str) -> list[Node]:
    """Returns the slots that --include names, or all slots except those that --exclude names.

    A filter consists of NAME[:SLOT,...] parts joined by @. A name alone means all slots of that
    host. Nodes are in the order of `hosts`.

    Raises ValueError if both filters are given, a name or slot is unknown, or no slot is left.
    """
    if include and exclude:
        raise ValueError("[launch::select] --include and --exclude are both given: give only one")
    named = _parse(include or exclude, {host.name: host for host in hosts}, bool(include))
    nodes = []
    for host in hosts:
        every = set(range(host.slots))
        kept = named.get(host.name, set()) if include else every - named.get(host.name, set())
        if kept:
            nodes.append(Node(host.name, tuple(sorted(kept))))
    if not nodes:
        raise ValueError(f"[launch::select] --exclude {exclude} leaves no slot of any host")
    return nodes


def _parse(text: str, hosts: dict[str, Host], included: bool) -> dict[str, set[int]]:
    """Returns the slots in a filter by host name."""
    option = "--include" if included else "--exclude"
    named: dict[str, set[int]] = {}
    for spec in _specs(text, hosts) if text else []:
        name, _, list_of_slots = (spec, "", "") if spec in hosts else spec.rpartition(":")
        if name not in hosts:
            known = ", ".join(hosts)
            raise ValueError(
                f"[launch::select] {option} {text}: no host {name or spec!r}; allowed are {known}"
            )
        host = hosts[name]
        pieces = list_of_slots.split(",") if list_of_slots else [str(n) for n in range(host.slots)]
        for piece in pieces:
            if not piece.isdecimal() or int(piece) >= host.slots:
                raise ValueError(
                    f"[launch::select] {option} {text}: no slot {piece!r} on {name}; allowed are "
                    f"0 to {host.slots - 1} ({host.where})"
                )
        named.setdefault(name, set()).update(int(piece) for piece in pieces)
    return named


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
            f"[launch::first] --num-nodes {num_nodes}: there are {len(hosts)} hosts "
            f"({', '.join(host.name for host in hosts)})"
        )
    nodes = []
    for host in hosts[: num_nodes or len(hosts)]:
        if num_slots > host.slots:
            raise ValueError(
                f"[launch::first] --num-gpus {num_slots}: {host.name} has slots={host.slots} "
                f"({host.where})"
            )
        slots: Slots = tuple(range(num_slots or host.slots))
        nodes.append(Node(host.name, slots))
    return nodes
