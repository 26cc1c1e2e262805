"""Formats the output of `penstock top`: turns plain data into lines of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from penstock.cli.live_status import Place
from penstock.monitor.console import amount
from penstock.monitor.report import size

_BAR = 20
_PHRASE = 24  # columns reserved for the phrase of a rank
_LEAST = 7  # minimum rows of each run if several are shown
_GAP = "  "


@dataclasses.dataclass(frozen=True)
class View:
    """One run at one moment.

    Attributes:
        name: name of the run's folder, or "".
        ranks: number of ranks.
        places: positions of all ranks, in order.
        late: ranks that others wait for.
        verdict: the sentence of `penstock status`; "" for a run of one rank.
        elapsed_s: seconds since the run began.
        about: contents of its run.json; {} if there is none.
        pace_s: expected seconds per remaining step; None if unknown.
    """

    name: str
    ranks: int
    places: Sequence[Place]
    late: Sequence[int]
    verdict: str
    elapsed_s: float
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    pace_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """Text no wider than the terminal, and its style: "", "bold", "dim" or "late"."""

    text: str
    style: str = ""


# ---- words


def clock(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds: 1:02:03."""
    whole = int(max(seconds, 0.0))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def clipped(text: str, width: int) -> str:
    """Cuts the text to `width`, and replaces control characters."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[:width]


def _known(place: Place, name: str) -> float | None:
    value = place.numbers.get(name, math.nan)
    return value if math.isfinite(value) else None


def _values(places: Sequence[Place], name: str) -> list[float]:
    return [value for place in places if (value := _known(place, name)) is not None]


def first(places: Sequence[Place], name: str) -> float | None:
    """Returns a metric of the run from the first rank that has it."""
    return next(iter(_values(places, name)), None)


def _most(places: Sequence[Place], name: str) -> float | None:
    return max(_values(places, name), default=None)


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100.0 else clock(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


# ---- columns


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the table. Columns with a higher `need` are dropped first; 0 is never dropped."""

    name: str
    need: int
    cell: Callable[[Place], str]
    total: Callable[[Sequence[Place]], str] = lambda _: ""


def _waited(place: Place) -> float | None:
    exposed, step_s = _known(place, "exposed_s"), _known(place, "step_s")
    return exposed / step_s if exposed is not None and step_s else None


def _mean_waited(places: Sequence[Place]) -> float | None:
    shares = [share for place in places if (share := _waited(place)) is not None]
    return sum(shares) / len(shares) if shares else None


def _steps(places: Sequence[Place]) -> str:
    steps = [place.step for place in places if place.step is not None]
    return "-".join(str(step) for step in sorted({min(steps), max(steps)})) if steps else ""


def _of_step(name: str, column: str, need: int, text: Callable[[float], str]) -> _Column:
    """Makes a column with the value of each rank; the total is the largest value."""
    return _Column(
        column,
        need,
        lambda place: _text(_known(place, name), text),
        lambda places: _text(_most(places, name), text),
    )


def _memory(tier: str, need: int) -> _Column:
    """Makes a column with the bytes of one tier. A cell is empty if no bytes are used."""
    name = f"{tier}_bytes"
    return _Column(
        tier,
        need,
        lambda place: _text(_known(place, name) or None, size),
        lambda places: _text(sum(_values(places, name)) or None, size),
    )


_COLUMNS = (
    _Column("rank", 0, lambda place: str(place.rank), lambda _: "all"),
    _Column("pid", 7, lambda place: place.pid),
    _Column("step", 0, lambda place: _text(place.step, str), _steps),
    _of_step("step_s", "s/step", 1, _three_digits),
    _Column(
        "waited",
        3,
        lambda place: _text(_waited(place), _percent),
        lambda places: _text(_mean_waited(places), _percent),
    ),
    _memory("device", 4),
    _memory("host", 5),
    _memory("disk", 6),
    _of_step("age_s", "last", 8, _duration),
    _Column("for", 2, lambda place: _text(place.for_s, _duration)),
)


def _chosen(places: Sequence[Place], columns: int) -> list[tuple[_Column, int]]:
    """Returns the columns that have values and leave room for the phrase, with their widths."""
    widths = {}
    for column in _COLUMNS:
        cells = [column.cell(place) for place in places]
        if any(cells):
            widths[column] = max(map(len, [column.name, column.total(places), *cells]))
    room, kept = columns - _PHRASE, set()
    for column in sorted(widths, key=lambda one: one.need):
        needed = widths[column] + len(_GAP)
        if column.need and needed > room:
            break
        room -= needed
        kept.add(column)
    return [(column, width) for column, width in widths.items() if column in kept]


# ---- ranks


def _urgency(place: Place, late: Sequence[int]) -> tuple[int, float]:
    """Returns a sort key: late ranks first, then ranks that have ended, ranks that work and ranks
    that wait. In each group the longest time comes first."""
    if place.rank in late:
        group = 0
    elif place.step is None:
        group = 1
    else:
        group = 3 if place.waits else 2
    return group, -(place.for_s or 0.0)


def _style(place: Place, late: Sequence[int]) -> str:
    if place.rank in late:
        return "late"
    return "dim" if place.waits or place.step is None else ""


def _table(view: View, columns: int, rows: int) -> list[Line]:
    """Returns a heading, one line per rank and a total. If there are more ranks than rows, the
    result has the most urgent ranks."""
    chosen = _chosen(view.places, columns)

    def line(cells: Sequence[str], phrase: str, style: str) -> Line:
        padded = (cell.rjust(width) for cell, (_, width) in zip(cells, chosen, strict=True))
        return Line(clipped(_GAP.join([*padded, phrase]), columns), style)

    places, fixed = list(view.places), 2 if len(view.places) > 1 else 1
    if len(places) > rows - fixed:
        places.sort(key=lambda place: _urgency(place, view.late))
        places = places[: max(rows - fixed - 1, 1)]
    lines = [line([column.name for column, _ in chosen], "what", "bold")]
    for place in places:
        cells = [column.cell(place) for column, _ in chosen]
        lines.append(line(cells, place.what, _style(place, view.late)))
    if len(places) < len(view.places):
        lines.append(Line(clipped(f"... and {len(view.places) - len(places)} more", columns)))
    if fixed == 2:
        there = [place for place in view.places if place.step is not None]
        phrase = f"{len(there)} here, {sum(place.waits for place in there)} wait"
        lines.append(line([column.total(there) for column, _ in chosen], phrase, "bold"))
    return lines


# ---- the run


def _title(view: View) -> str:
    about = view.about
    ranks = "1 rank" if view.ranks == 1 else f"{view.ranks} ranks"
    transport = about.get("transport") if view.ranks > 1 else None
    parts = [about.get("strategy"), ranks, transport, f"elapsed {clock(view.elapsed_s)}"]
    return _GAP.join([*filter(None, [view.name]), ", ".join(str(one) for one in parts if one)])


def _progress(view: View) -> str:
    steps = _values(view.places, "step")
    if not steps:
        return ""
    step = int(min(steps))
    total = int(view.about.get("config", {}).get("schedule", {}).get("total_steps", 0))
    if total <= 0:
        return f"{step} steps"
    share = min(step / total, 1.0)
    bar = ("#" * round(share * _BAR)).ljust(_BAR, ".")
    parts = [f"step {step} of {total}", f"[{bar}]", _percent(share)]
    if view.pace_s is not None and step < total:
        parts.append(f"{clock((total - step) * view.pace_s)} left")
    return _GAP.join(parts)


def _numbers(view: View, columns: int) -> str:
    """Returns the metrics of the run that fit in one line."""
    places = view.places
    tokens = first(places, "tokens_per_s")
    told = {
        "loss": _text(first(places, "loss"), lambda value: f"{value:.4f}"),
        "tokens/s": _text(tokens, amount),
        "samples/s": "" if tokens is not None else _text(first(places, "samples_per_s"), amount),
        "MFU": _text(first(places, "mfu"), lambda value: f"{100 * value:.1f} %"),
        "grad norm": _text(first(places, "grad_norm"), _three_digits),
        "lr": _text(first(places, "lr"), _three_digits),
    }
    line = ""
    for part in (f"{name} {text}" for name, text in told.items() if text):
        longer = f"{line}{_GAP}{part}" if line else part
        if len(longer) > columns:
            break
        line = longer
    return line


def _run(view: View, columns: int, rows: int) -> list[Line]:
    style = "late" if view.late else ""
    top = [
        Line(_title(view), "bold"),
        Line(_progress(view)),
        Line(_numbers(view, columns)),
        Line(view.verdict, style),
    ]
    lines = [Line(clipped(line.text, columns), line.style) for line in top if line.text]
    return lines + _table(view, columns, rows - len(lines))


def frame(views: Sequence[View], columns: int, rows: int) -> list[Line]:
    """Returns the lines of all runs for a terminal of that size."""
    most = max(rows // _LEAST, 1)
    shown = views[:most]
    more = len(views) - len(shown)
    room, lines = rows - (1 if more else 0), list[Line]()
    for index, view in enumerate(shown):
        if lines:
            lines.append(Line(""))
        lines += _run(view, columns, (room - len(lines)) // (len(shown) - index))
    del lines[room:]
    if more:
        lines.append(Line(clipped(f"... and {more} more run{'s' * (more > 1)}", columns)))
    return lines


def last_words(name: str, step: int | None, loss: float | None) -> str:
    """Returns the sentence about a run that has ended."""
    subject = f"{name}: the run" if name else "the run"
    if step is None:
        return f"{subject} has ended"
    told = _text(loss, lambda value: f", loss {value:.4f}")
    return f"{subject} has ended; its last step was {step}{told}"
