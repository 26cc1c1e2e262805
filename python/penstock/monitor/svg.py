"""Draws charts as SVG without a library: lines, stacked areas and rows of slices.

Sizes are in SVG user units; the picture scales to the page. Each chart's figure has the ranges of
its axes in the attributes `data-x` and `data-y`, so that a program can check the chart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 92, 26, 14, 30
_MOST_POINTS = 600


def thinned(points: Points) -> Points:
    """Returns at most _MOST_POINTS of the points, evenly spaced, with the first and the last."""
    if len(points) <= _MOST_POINTS:
        return points
    stride = (len(points) - 1) / (_MOST_POINTS - 1)
    return [points[round(index * stride)] for index in range(_MOST_POINTS)]


def ticks(low: float, high: float, count: int = 4, binary: bool = False) -> list[float]:
    """Returns round values from low to high. With `binary` their step is a power of two."""
    span = high - low
    if span <= 0:
        return [low]
    if binary:
        step = 2.0 ** math.ceil(math.log2(span / count))
    else:
        step = 10.0 ** math.floor(math.log10(span / count))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def number(value: float, digits: int = 4) -> str:
    """Returns the value with that many digits, and with a unit letter from 1000 on ("12.3k")."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


class Axes:
    """Maps values to positions in the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        along = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def points(self, points: Points) -> str:
        return " ".join(f"{x:.2f},{y:.2f}" for x, y in (self.at(*one) for one in points))

    def grid(self, text: Callable[[float], str], binary: bool = False) -> str:
        parts = []
        for value in ticks(*self.y, binary=binary):
            _, y = self.at(self.x[0], value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
                f'<text x="{LEFT - 8}" y="{y + 4:.2f}" text-anchor="end">{text(value)}</text>'
            )
        for value in ticks(*self.x, count=6):
            x, _ = self.at(value, self.y[0])
            parts.append(
                f'<text x="{x:.2f}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>'
            )
        return "".join(parts)


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return min(0.0, low), high * 1.05 or 1.0
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def figure(name: str, title: str, body: str, axes: Axes | None = None, legend: str = "") -> str:
    """Returns a <figure> with a title, the SVG body and the legend."""
    told = ""
    if axes is not None:
        told = f' data-x="{axes.x[0]!r} {axes.x[1]!r}" data-y="{axes.y[0]!r} {axes.y[1]!r}"'
    return (
        f'<figure id="{name}"{told}><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{body}'
        f"</svg>{legend}</figure>"
    )


def legend(names: Sequence[str]) -> str:
    """Returns the legend: each name with its colour, which is its index."""
    items = (
        f'<span><i class="swatch c{index}"></i>{html.escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def lines(
    name: str,
    title: str,
    series: dict[str, Points],
    text: Callable[[float], str] = number,
    from_zero: bool = False,
) -> str:
    """Returns a chart with one line per series on shared axes; "" if there are no values."""
    series = {label: thinned(points) for label, points in series.items() if points}
    if not series:
        return ""
    everything = [point for points in series.values() for point in points]
    steps = [x for x, _ in everything]
    axes = Axes((min(steps), max(steps)), _range([y for _, y in everything], from_zero))
    drawn = []
    for index, (label, points) in enumerate(series.items()):
        last = html.escape(f"{label}: {text(points[-1][1])}")
        at = axes.at(*points[-1])
        drawn.append(
            f'<polyline class="line c{index}" data-series="{html.escape(label)}" '
            f'points="{axes.points(points)}"><title>{last}</title></polyline>'
            f'<circle class="dot c{index}" cx="{at[0]:.2f}" cy="{at[1]:.2f}" r="3.5">'
            f"<title>{last}</title></circle>"
        )
    names = legend(list(series)) if len(series) > 1 else ""
    return figure(name, title, axes.grid(text) + "".join(drawn), axes, names)


def stacked(
    name: str,
    title: str,
    series: dict[str, Points],
    text: Callable[[float], str] = number,
    limit: tuple[str, float] | None = None,
) -> str:
    """Returns a chart of stacked areas in bytes; "" if there are no values.

    All series must have the same steps. `limit` is the name and the value of a dashed line.
    """
    series = {label: thinned(points) for label, points in series.items() if points}
    if not series:
        return ""
    steps = [x for x, _ in next(iter(series.values()))]
    tops = [0.0] * len(steps)
    bands = []
    for label, points in series.items():
        bottoms, tops = tops, [top + y for top, (_, y) in zip(tops, points, strict=True)]
        bands.append((label, bottoms, tops))
    high = max([*tops, limit[1] if limit else 0.0])
    axes = Axes((min(steps), max(steps)), (0.0, high * 1.08 or 1.0))
    drawn = []
    for index, (label, bottoms, upper) in enumerate(bands):
        there = list(zip(steps, upper, strict=True))
        back = list(zip(steps, bottoms, strict=True))[::-1]
        size = html.escape(f"{label}: {text(upper[-1] - bottoms[-1])}")
        drawn.append(
            f'<polygon class="area c{index}" data-series="{html.escape(label)}" '
            f'points="{axes.points([*there, *back])}"><title>{size}</title></polygon>'
        )
    names = list(series)
    if limit is not None:
        _, y = axes.at(steps[0], limit[1])
        drawn.append(
            f'<line class="limit" data-series="{html.escape(limit[0])}" x1="{LEFT}" '
            f'x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text x="{WIDTH - RIGHT}" y="{y - 5:.2f}" text-anchor="end">'
            f"{html.escape(limit[0])} {text(limit[1])}</text>"
        )
    return figure(name, title, axes.grid(text, binary=True) + "".join(drawn), axes, legend(names))
