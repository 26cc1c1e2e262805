"""Mutated hostfiles and filters: slots as DeepSpeed gives them, or an error with a remedy.

`as_deepspeed` states DeepSpeed 0.19's rules once more, without Penstock's parser."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from penstock.launch import hostfile

HOSTS = "# all\nnode1 slots=4\nnode2\tslots=2 # two\n\n  node3   slots=8\n"
FILTERS = (
    "",
    "node1",
    "node3:0,2",
    "node1@node2:1",
    "node1:3@node3:0,1,2",
    "node2:0@node2:1@node3:7",
)
PIECES = (
    *" \t\r\n\x0c\x00:,@#=-+_0127é",
    *("\u2028", "\u0661", "\ufeff", "99999999999", "slots=", "slots=0", "max_slots=9", "\nnode1 "),
    *("node1", "@node1", "node2:", "node3:1", "node1:0,", "node4", "node1 slots=1\n"),
)
ERRORS = (
    r"\[launch::hostfile\] .*hosts:\d+: .*; (allowed are .*|name each host once, .*)",
    r"\[launch::hostfile\] .*hosts has no host; allowed are .*",
    r"\[launch::hostfile\] .*hosts:\d+: .* is not a host name; allowed are .*",
    r"\[launch::select\] --(in|ex)clude .*: there is no host .*; allowed are .*",
    r"\[launch::select\] --(in|ex)clude .*: no slot .*; allowed are 0 to \d+ \(.*hosts:\d+\)",
    r"\[launch::select\] --(in|ex)clude .*: .* is empty; allowed are .* \(.*hosts:\d+\), or .*",
    r"\[launch::select\] --(in|ex)clude .*: .* both with and without slots; give the host .*",
    r"\[launch::select\] --exclude .* leaves no slot of any host; exclude fewer slots",
)


def mutated(text: str, draw: random.Random) -> str:
    """The text after one to three random edits."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randint(0, len(text))
        end = min(len(text), at + draw.randint(0, 4))
        put = draw.choice(("", draw.choice(PIECES), draw.choice(PIECES), text[at:end] * 2))
        text = text[:at] + put + text[end if draw.random() < 0.5 else at :]
    return text


def case(seed: int) -> tuple[str, str, str]:
    """A hostfile, --include and --exclude, at least one of them mutated."""
    draw = random.Random(seed)
    text, filter_ = HOSTS, draw.choice(FILTERS)
    what = draw.randint(0, 4)
    text = mutated(text, draw) if what <= 1 else text
    filter_ = mutated(filter_, draw) if what >= 1 else filter_
    return (text, filter_, "") if draw.random() < 0.5 else (text, "", filter_)


def _hosts(text: str) -> dict[str, int] | None:
    hosts: dict[str, int] = {}
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        count = words[-1].removeprefix("slots=")
        digits = "".join(itertools.takewhile(str.isdecimal, count))
        if len(words) < 2 or count == words[1] or not digits or words[0] in hosts:
            return None
        hosts[words[0]] = int(digits)
    return hosts or None


def _asked(text: str, hosts: dict[str, int]) -> dict[str, set[int]] | None:
    """The slots in a filter by host; an empty set means all."""
    asked: dict[str, set[int]] = {}
    for part in text.split("@") if text else ():
        name, *lists = part.split(":")
        try:
            slots = {int(piece) for one in lists for piece in one.split(",")}
        except ValueError:
            return None
        if len(lists) > 1 or name not in hosts or not all(0 <= s < hosts[name] for s in slots):
            return None
        asked.setdefault(name, set()).update(slots)
    return asked


def as_deepspeed(text: str, include: str, exclude: str) -> dict[str, range | list[int]] | None:
    """The slots that DeepSpeed 0.19 uses by host, in order; None if it refuses them."""
    hosts = _hosts(text)
    asked = _asked(include or exclude, hosts) if hosts else None
    if hosts is None or asked is None:
        return None
    kept: dict[str, range | list[int]] = {}
    for name, count in hosts.items():
        named = asked.get(name)
        if include and named is not None:
            kept[name] = sorted(named) or range(count)
        elif not include and named is None:
            kept[name] = range(count)
        elif not include and named:
            kept[name] = [slot for slot in range(count) if slot not in named]
    return {name: slots for name, slots in kept.items() if slots} or None


def outcome(folder, text: str, include: str, exclude: str) -> dict[str, tuple[int, ...]] | str:
    """The slots that Penstock uses by host, or the text of its error."""
    path = folder / "hosts"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        nodes = hostfile.select(hostfile.read_hostfile(str(path)), include, exclude)
    except ValueError as error:
        return str(error)
    return {node.name: node.slots for node in nodes}


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_mutated_hostfiles_and_filters(first, tmp_path):
    accepted = refused = 0
    for seed in range(first, first + 100):
        given = case(seed)
        ours, theirs = outcome(tmp_path, *given), as_deepspeed(*given)
        if isinstance(ours, str):
            assert any(re.fullmatch(one, ours, re.DOTALL) for one in ERRORS), (seed, given, ours)
            refused += 1
            continue
        split = {name: tuple(slots) for name, slots in (theirs or {}).items()}
        assert list(ours.items()) == list(split.items()), (seed, given, theirs)
        accepted += 1
    assert accepted >= 10 and refused >= 30


@pytest.mark.parametrize("text", FILTERS)
def test_what_was_mutated_is_accepted(text, tmp_path):
    for include, exclude in ((text, ""), ("", text)):
        theirs = as_deepspeed(HOSTS, include, exclude)
        assert theirs is not None
        ours = outcome(tmp_path, HOSTS, include, exclude)
        assert ours == {name: tuple(slots) for name, slots in theirs.items()}
