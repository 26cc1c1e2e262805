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
_RESIDENT = {
    "engine": "engine",
    "libraries": "code of libraries",
    "shared": "shared between ranks",
    "heap": "heap (tensors and objects of Python and torch)",
    "heap_free": "freed tensors, whose memory malloc keeps for later ones",
}


def _row(name: str, entry: dict[str, int], columns: list[str]) -> str:
    cells = "".join(f"{entry[column] / 2**20:>14.2f}" for column in columns)
    return f"{name:<22}{cells}"


def _memory_lines(
    resident: dict[str, int], measured: dict[str, int], predicted: dict[str, int]
) -> list[str]:
    parts = ", ".join(f"{text} {resident[key] / 2**20:.2f}" for key, text in _RESIDENT.items())
    rest = resident["process"] - sum(resident[key] for key in _RESIDENT)
    both = f"{measured['memory'] / 2**20:.2f} of {predicted['memory'] / 2**20:.2f} predicted"
    return [
        f"device and host at one time, the sum that a budget limits: {both}",
        f"the process now has {resident['process'] / 2**20:.2f}: {parts}, "
        f"rest (objects of Python, stacks) {max(0, rest) / 2**20:.2f}",
    ]


def format_ledger(ledger: dict[str, Any], measured: bool = True) -> str:
    """Returns the ledger as a table in MiB per rank: peaks in memory, and disk space if not 0.

    Each column is the peak at its own moment, so the parts may add up to more than the total. The
    total adds the peaks of device and host; the line "at one time" has the peak of their sum.

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
        lines += _memory_lines(ledger["resident"], ledger["measured"], predicted[running])
    if measured and ledger["measured"]["activations"] > 0:
        own, both = ledger["measured"]["activations"], predicted[running]["step_memory"]
        lines.append(
            f"activations in step two {own / 2**20:.2f}; predicted peak of device and host with "
            f"them {both / 2**20:.2f}"
        )
    if measured and ledger["measured"]["act"] > 0:
        lines.append(f"activations offloaded{ledger['measured']['act'] / 2**20:>15.2f}")
    if measured and ledger["measured"]["cache"] > 0:
        lines.append(f"cached tokens offloaded{ledger['measured']['cache'] / 2**20:>13.2f}")
    return "\n".join(lines)
