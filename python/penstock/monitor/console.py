"""Console output: one line of text per reported step."""

from __future__ import annotations

import sys
from typing import Any

from penstock.monitor import svg

Row = dict[str, Any]


def amount(value: float | None) -> str:
    """Returns the value with three digits and a unit letter ("12.3k"), "" for None."""
    return "" if value is None else svg.number(value, digits=3)


def line(row: Row) -> str:
    """Returns the text for one step's metrics. Unknown values are left out."""
    memory = row["device_peak_bytes"] + row["host_peak_bytes"]
    share = row["exposed_s"] / row["step_s"] if row["step_s"] else 0.0
    parts = {
        "loss": row["loss"] is not None and f"{row['loss']:.4f}",
        "grad norm": f"{row['grad_norm']:.3g}",
        "lr": row["lr"] is not None and f"{row['lr']:.3g}",
        "tokens/s": amount(row["tokens_per_s"]),
        "samples/s": "" if row["tokens_per_s"] else amount(row["samples_per_s"]),
        "MFU": row["mfu"] is not None and f"{100 * row['mfu']:.1f} %",
        "memory": f"{memory / 2**30:.2f} GiB",
        "disk": row["disk_bytes"] and f"{row['disk_bytes'] / 2**30:.2f} GiB",
        "exposed": f"{100 * share:.0f} %",
        "loss scale": row["loss_scale"] != 1.0 and amount(row["loss_scale"]),
        "skipped": row["skipped_steps"] and str(row["skipped_steps"]),
    }
    return "  ".join(f"{name} {text}" for name, text in parts.items() if text)


class Console:
    """Writes to stderr: a progress bar on a terminal if tqdm is installed, else a line per row."""

    name = "console"

    def __init__(self, how: str, total: int) -> None:
        self._bar: Any = None
        if how == "bar" or (how == "auto" and sys.stderr.isatty()):
            try:
                from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415
            except ImportError:
                return
            self._bar = tqdm(total=total or None, unit="step", dynamic_ncols=True)

    def write(self, row: Row) -> None:
        if self._bar is None:
            print(f"step {row['step']:>6}  {line(row)}", file=sys.stderr, flush=True)
            return
        self._bar.set_postfix_str(line(row), refresh=False)
        self._bar.update(row["step"] - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
