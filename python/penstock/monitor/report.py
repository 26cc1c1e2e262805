"""Writes report.html: one page that describes a run or compares two. It needs no network."""

from __future__ import annotations

import collections
import datetime
import html
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from penstock.monitor import predicted, step_picture, svg
from penstock.monitor.run import Run, read

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--soft:#57606a;--edge:#d0d7de;
--card:#f6f8fa;--c0:#0b62c4;--c1:#b35900;--c2:#1a7f4b;--c3:#a0308f;--c4:#6b5b00;--c5:#c0262d}
@media(prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--soft:#9da7b3;--edge:#30363d;
--card:#161b22;--c0:#6cb0ff;--c1:#ffa657;--c2:#5fd38d;--c3:#e38fd8;--c4:#d6c24a;--c5:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1400px;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0 0 4px}h2{font-size:1.1rem;margin:28px 0 8px}
.grid2{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
figure{margin:0;padding:10px;border:1px solid var(--edge);border-radius:8px;background:var(--card)}
figure.wide{grid-column:1/-1}figcaption{font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:17px}
.wide svg text{font-size:13px}
.grid{stroke:var(--edge)}.line{fill:none;stroke-width:2}
.limit{stroke:var(--text);stroke-dasharray:6 4}
.area{fill-opacity:.55}.scroll,pre,.table{overflow-x:auto}
.facts{display:grid;gap:8px 18px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}
.facts small{display:block;color:var(--soft)}
.legend{margin:6px 0 0;display:flex;flex-wrap:wrap;gap:4px 14px;color:var(--soft);font-size:13px}
.swatch{display:inline-block;width:11px;height:11px;margin-right:5px;border-radius:2px}
table{border-collapse:collapse;width:100%}td,th{padding:4px 10px;text-align:right;
border-bottom:1px solid var(--edge)}td:first-child,th:first-child{text-align:left}
pre{padding:10px;border:1px solid var(--edge);border-radius:8px;background:var(--card);
font-size:12px}@media(max-width:620px){svg text{font-size:20px}.wide svg text{font-size:16px}}
""" + "".join(
    f"rect.c{i},.area.c{i},.dot.c{i}{{fill:var(--c{i})}}.line.c{i}{{stroke:var(--c{i})}}"
    f".swatch.c{i}{{background:var(--c{i})}}"
    for i in range(6)
)
_ROLES = {
    "parameters": "param_bytes",
    "gradients": "grad_bytes",
    "optimizer": "optim_bytes",
    "buffers": "buffer_bytes",
}


def size(value: float) -> str:
    for unit, letter in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= unit:
            digits = 4 if abs(value) >= 999.5 * unit else 3
            return f"{value / unit:.{digits}g} {letter}"
    return f"{value:.0f} B"


def _millis(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _share(value: float) -> str:
    return f"{value:.3g} %"


# (figure id, title, column name or function of a row, value formatter, whether y begins at zero)
_CHARTS: tuple[tuple[str, str, str | Callable[[dict[str, Any]], float | None], Any, bool], ...] = (
    ("loss", "Loss", "loss", svg.number, False),
    ("grad_norm", "Gradient norm", "grad_norm", svg.number, False),
    ("lr", "Learning rate", "lr", svg.number, True),
    ("tokens_per_s", "Tokens a second", "tokens_per_s", svg.number, True),
    ("samples_per_s", "Samples a second", "samples_per_s", svg.number, True),
    (
        "mfu",
        "Model FLOPs utilisation",
        lambda row: None if row.get("mfu") is None else 100 * row["mfu"],
        _share,
        True,
    ),
    (
        "exposed",
        "Time in which the model waited",
        lambda row: 100 * row["exposed_s"] / row["step_s"] if row.get("step_s") else None,
        _share,
        True,
    ),
    (
        "disk_gb_per_s",
        "GB a second while the disk worked",
        lambda row: row.get("disk_gb_per_s"),
        svg.number,
        True,
    ),
)


def _column(run: Run, what: str | Callable[[dict[str, Any]], float | None]) -> svg.Points:
    if isinstance(what, str):
        return run.column(what)
    pairs = [(float(row["step"]), what(row)) for row in run.rows]
    return [(x, y) for x, y in pairs if y is not None]


def _labels(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [f"{n} ({i})" for i, n in enumerate(names)]


def _curves(runs: Sequence[Run]) -> str:
    labels = _labels(runs)
    drawn = []
    for name, title, what, text, from_zero in _CHARTS:
        series = {label: _column(run, what) for label, run in zip(labels, runs, strict=True)}
        drawn.append(svg.lines(name, title, series, text, from_zero))
    return "".join(drawn)


def _memory(run: Run, name: str) -> str:
    if not run.rows:
        return ""
    series: dict[str, svg.Points] = {label: run.column(column) for label, column in _ROLES.items()}
    peak = run.about.get("predicted", {}).get("total")
    limit = ("predicted peak", float(peak)) if peak else None
    return svg.stacked(name, "Memory after each step, by role, on rank 0", series, size, limit)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else float("nan")


def facts(run: Run) -> dict[str, str]:
    """Returns the summary values of a run as text by name. Unknown values are left out."""
    last = run.rows[-1] if run.rows else {}
    about = run.about
    started = about.get("started")
    when = datetime.datetime.fromtimestamp(started, datetime.timezone.utc) if started else None
    peak = last.get("device_peak_bytes", 0) + last.get("host_peak_bytes", 0)
    tokens = [y for _, y in run.column("tokens_per_s")]
    mfu = [y for _, y in run.column("mfu")]
    found = {
        "started": f"{when:%Y-%m-%d %H:%M} UTC" if when else None,
        "strategy": about.get("strategy"),
        "ranks": about.get("ranks"),
        "exchange through": about.get("transport"),
        "steps": last.get("step"),
        "last loss": None if last.get("loss") is None else svg.number(last["loss"]),
        "median step": _millis(_median([r["step_s"] for r in run.rows])) if last else None,
        "predicted step": _millis(about["predicted"]["step_s"])
        if "step_s" in about.get("predicted", {})
        else None,
        "median tokens/s": svg.number(_median(tokens)) if tokens else None,
        "median MFU": f"{100 * _median(mfu):.3g} %" if mfu else None,
        "peak memory, rank 0": size(peak) if last else None,
        "predicted memory": size(about["predicted"]["total"]) if "predicted" in about else None,
        "on disk, rank 0": size(last["disk_bytes"]) if last.get("disk_bytes") else None,
        "skipped steps": last.get("skipped_steps") or None,
        "torch": about.get("torch"),
        "Penstock": about.get("version"),
        "host": about.get("host"),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    top = "".join(f"<th>{html.escape(one)}</th>" for one in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="table"><table id="{name}"><tr>{top}</tr>{body}</table></div>'


def _summary(runs: Sequence[Run]) -> str:
    told = [facts(run) for run in runs]
    if len(runs) == 1:
        cells = (
            f"<div><small>{html.escape(name)}</small>{html.escape(value)}</div>"
            for name, value in told[0].items()
        )
        return f'<div id="facts" class="facts">{"".join(cells)}</div>'
    names = dict.fromkeys(name for one in told for name in one)
    rows = [[name, *(one.get(name, "") for one in told)] for name in names]
    return _table(["", *_labels(runs)], rows, "facts")


def _plan(run: Run) -> str:
    sections = run.about.get("plan", {})
    rows = []
    for name, text in sections.items():
        words = (line.split()[0] for line in text.splitlines() if line.strip())
        counts = collections.Counter(words)
        if counts:
            told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
            rows.append([name, str(counts.total()), told])
    return _table(["section", "lines", "of them"], rows, "plan") if rows else ""


def _predicted(run: Run) -> str:
    """Returns the tables of predicted and measured times; "" if the trace has no predictions."""
    found = predicted.lines(run.trace)
    if not found:
        return ""
    heads = [
        f"of rank {step_picture.first_rank(run.trace)}, ms a step",
        "lines",
        "predicted",
        "measured",
        "off by",
    ]

    def rows(some: Sequence[predicted.Line]) -> list[list[str]]:
        return [
            [
                one.name,
                str(one.count),
                *(f"{x:.3g}" for x in (one.predicted, one.measured)),
                f"{one.off:+.3g}",
            ]
            for one in some
        ]

    worst = sorted(found, key=lambda line: -abs(line.off))[:12]
    step = run.about.get("predicted", {}).get("step_s")
    measured = _median([row["step_s"] for row in run.rows])
    text = (
        f"<p>A step is predicted to take {_millis(step)}, and the median took {_millis(measured)}. "
        f"Lanes overlap with compute, so the lines do not add up to the step. An exchange includes "
        f"the wait for ranks that are late.</p>"
        if step is not None
        else ""
    )
    return (
        f"<h2>Predicted and measured</h2>{text}"
        f"{_table(heads, rows(predicted.kinds(found)), 'predicted')}"
        f"<details><summary>Lines with the largest difference</summary>"
        f"{_table(heads, rows(worst), 'furthest')}</details>"
    )


def _differences(first: Run, second: Run) -> str:
    flat = [_flat(run.about.get("config", {})) for run in (first, second)]
    rows = [
        [key, flat[0].get(key, ""), flat[1].get(key, "")]
        for key in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(key) != flat[1].get(key)
    ]
    rows = rows or [["no difference", "", ""]]
    return "<h2>Settings that differ</h2>" + _table(["key", *_labels([first, second])], rows)


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        return {path: json.dumps(value)}
    flat: dict[str, str] = {}
    for key, one in value.items():
        flat |= _flat(one, f"{path}.{key}" if path else key)
    return flat


def write(folders: Sequence[str | pathlib.Path], path: str | pathlib.Path) -> None:
    """Writes the page about the runs in one or two folders.

    Raises ValueError if a folder has no run or the page cannot be written.
    """
    text = page([read(folder) for folder in folders])
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"[report] {path} cannot be written: {error.strerror}") from None


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML for one run, or for two runs side by side."""
    first = runs[0]
    title = html.escape(" and ".join(_labels(runs)))
    parts = [_summary(runs), '<h2>Curves</h2><div class="grid2">', _curves(runs)]
    for index, run in enumerate(runs):
        parts.append(_memory(run, "memory" if index == 0 else "memory2"))
    parts.append(step_picture.picture(first.trace))
    parts.append("</div>")
    parts.append(_predicted(first))
    if not first.rows:
        kept = first.about.get("config", {}).get("monitor", {}).get("formats", ["jsonl"])
        why = "" if "jsonl" in kept else ' to read: "monitor.formats" does not include "jsonl"'
        parts.append(f"<p>There are no steps yet{html.escape(why)}.</p>")
    if len(runs) > 1:
        parts.append(_differences(first, runs[1]))
    for run, label in zip(runs, _labels(runs), strict=True):
        if "explain" not in run.about:
            continue
        config = html.escape(json.dumps(run.about["config"], indent=2))
        parts.append(
            f"<h2>Plan of {html.escape(label)}</h2>{_plan(run)}"
            f"<details><summary>Config in effect</summary><pre>{config}</pre></details>"
            f"<details><summary>Table, units and every line of the plan</summary>"
            f"<pre>{html.escape(run.about['explain'])}</pre></details>"
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )
