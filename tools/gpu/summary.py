"""Formats a report as text."""

from __future__ import annotations

from typing import Any

TAIL_LINES = 12


def _machine(found: dict[str, Any]) -> list[str]:
    devices = ", ".join(f"{d['name']} ({d['memory_gib']} GiB)" for d in found["devices"]) or "none"
    return [
        f"devices    {devices}; driver {found['driver'] or 'none'}, CUDA {found['cuda'] or 'none'}",
        f"software   torch {found['torch']}, Python {found['python']}, {found['compiler']}",
        f"host       {found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB "
        f"({found['available_gib']} available), disk {found['disk_free_gib']} GiB free",
    ]


def _note(stage: dict[str, Any]) -> str:
    figures = stage.get("figures", {})
    parts = [stage["why"]] if stage.get("why") else []
    if "passed" in figures:
        parts.append(f"{figures['passed']} passed")
    if figures.get("failed"):
        parts.append(f"{len(figures['failed'])} failed: {', '.join(figures['failed'][:6])}")
    if "warnings" in figures:
        parts.append(f"{figures['warnings']} warnings, {len(figures.get('errors', []))} errors")
    if stage.get("kept"):
        parts.append("from an earlier call")
    return "; ".join(parts)


def of_demo(report: dict[str, Any]) -> str:
    """Returns the machine and the demo's table, or what text() does if there is none."""
    demo = report["stages"].get("demo", {})
    if demo.get("status") != "done":
        return text(report)
    return "\n".join(["", *_machine(report["machine"]), "", demo["figures"]["printed"].rstrip()])


def text(report: dict[str, Any]) -> str:
    """Returns the machine, a line for each stage, the benchmarks' output, and the failures."""
    lines = [f"device     {report['device']}, commit {report['commit'] or 'unknown'}"]
    lines += [*_machine(report["machine"]), "", f"{'stage':<16}{'status':<12}{'seconds':>8}"]
    for name, stage in report["stages"].items():
        seconds = stage.get("seconds_in_all", 0.0)
        lines.append(f"{name:<16}{stage['status']:<12}{seconds:>8.0f}  {_note(stage)}".rstrip())
    for name, stage in report["stages"].items():
        printed = stage.get("figures", {}).get("printed", "")
        if printed and stage["status"] != "failed":
            lines += ["", f"---- {name}", printed.rstrip()]
    for name, stage in report["stages"].items():
        if stage["status"] in ("failed", "out of time") and stage.get("tail"):
            lines += ["", f"---- {name}: {stage['status']}; the end of its output"]
            lines += stage["tail"].rstrip().splitlines()[-TAIL_LINES:]
    return "\n".join(lines)
