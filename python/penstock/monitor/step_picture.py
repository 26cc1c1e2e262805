"""Draws one step of a trace as SVG: a row for each lane, a box for each slice."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from penstock.monitor import svg

Event = dict[str, Any]
_KINDS = ("compute", "line", "exchange", "wait", "read", "write")
_ROW, _MOST = 22, 4000


def _closed(events: Sequence[Event]) -> list[Event]:
    """Returns the slices. A disk request becomes a slice from its begin and end events."""
    found, begun = [], {}
    for event in events:
        if event["ph"] == "X" and event["cat"] in _KINDS:
            found.append(event)
        elif event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e" and event["id"] in begun:
            first = begun.pop(event["id"])
            found.append(first | {"dur": event["ts"] - first["ts"]})
    return found


def first_rank(events: Sequence[Event]) -> int:
    """Returns the lowest rank in the trace."""
    return min((int(event["pid"]) for event in events if event["ph"] == "X"), default=0)


def last_step(events: Sequence[Event]) -> tuple[int, list[Event]]:
    """Returns the number of the first rank's last complete step and all ranks' slices in it."""
    first = first_rank(events)
    ends = [e for e in events if e["ph"] == "X" and e["cat"] == "step" and e["pid"] == first]
    if not ends:
        return 0, []
    whole = ends[-1]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    inside = [e for e in _closed(events) if e["ts"] < end and e["ts"] + e["dur"] > begin]
    return int(whole["args"]["step"]), inside


def picture(events: Sequence[Event]) -> str:
    """Returns the figure of the last complete step; "" if the trace has none."""
    step, slices = last_step(events)
    if not slices:
        return ""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = sorted({(e["pid"], e["tid"]) for e in slices})
    begin = min(e["ts"] for e in slices)
    span = max(e["ts"] + e["dur"] for e in slices) - begin or 1.0
    width, left = svg.WIDTH * 2, 150
    drawn = []
    for index, row in enumerate(rows):
        drawn.append(
            f'<text x="{left - 8}" y="{index * _ROW + 15}" text-anchor="end">'
            f"rank {row[0]} {html.escape(names.get(row, ''))}</text>"
        )
    place = {row: index for index, row in enumerate(rows)}
    # A slice inside another one is drawn after it.
    shown = sorted(slices, key=lambda e: (e["ts"], -e["dur"]))[:_MOST]
    for event in shown:
        x = left + (event["ts"] - begin) / span * (width - left)
        wide = max(0.5, event["dur"] / span * (width - left))
        inset = 0 if event["cat"] in ("compute", "read", "write") else 4
        inset = 7 if event["cat"] in ("exchange", "wait") else inset
        args = event.get("args", {})
        rate = f", {args['bytes']} bytes, {args.get('GB/s', 0)} GB/s" if "bytes" in args else ""
        what = html.escape(f"{event['name']}: {event['dur'] / 1e3:.3f} ms{rate}")
        y = place[event["pid"], event["tid"]] * _ROW + 2 + inset / 2
        drawn.append(
            f'<rect class="c{_KINDS.index(event["cat"])}" x="{x:.2f}" y="{y:.1f}" '
            f'width="{wide:.2f}" height="{_ROW - 4 - inset}"><title>{what}</title></rect>'
        )
    height = len(rows) * _ROW + 4
    more = f" (the first {_MOST} of {len(slices)} slices)" if len(slices) > _MOST else ""
    title = f"Step {step}: {span / 1e3:.1f} ms{more}"
    return (
        f'<figure id="timeline" class="wide" data-slices="{len(shown)}"><figcaption>{title}'
        f'</figcaption><div class="scroll"><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" style="min-width:700px">{"".join(drawn)}</svg></div>'
        f"{svg.legend(_KINDS)}</figure>"
    )
