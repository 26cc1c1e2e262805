"""Text forms of the memory ledger."""

from typing import Any

from penstock._native import _penstock

_COLUMNS = {
    "param": "parameters",
    "grad": "gradients",
    "optim": "optimizer",
    "buffers": "buffers",
    "total": "total",
    "disk": "on disk",
}


def _row(name: str, entry: dict[str, int], columns: list[str]) -> str:
    cells = "".join(f"{entry[column] / 2**20:>14.2f}" for column in columns)
    return f"{name:<22}{cells}"


def format_ledger(ledger: dict[str, Any], measured: bool = True) -> str:
    """Returns the ledger as a table in MiB per rank: peaks in memory, and disk space if not 0.

    Args:
        ledger: the result of `Engine.ledger()`.
        measured: also show the measured peaks of the running engine, and their ratio to the
            prediction.
    """
    running, predicted = ledger["strategy"], ledger["predicted"]
    columns = list(_COLUMNS)
    if all(entry["disk"] == 0 for entry in [*predicted.values(), ledger["measured"]]):
        columns.remove("disk")
    titles = "".join(f"{_COLUMNS[column]:>14}" for column in columns)
    lines = [f"{'MiB per rank (peak)':<22}{titles}"]
    shown = [name for name in _penstock.strategy_names() if name in predicted]
    lines += [_row(f"{name} predicted", predicted[name], columns) for name in shown]
    if measured:
        lines.append(_row(f"{running} measured", ledger["measured"], columns))
        ratio = ledger["measured"]["total"] / max(1, predicted[running]["total"])
        lines.append(f"measured / predicted   {ratio:.3f}")
    if measured and ledger["measured"]["act"] > 0:
        lines.append(f"activations offloaded{ledger['measured']['act'] / 2**20:>15.2f}")
    return "\n".join(lines)
