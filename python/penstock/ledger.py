"""Text forms of the memory ledger."""

from typing import Any

_COLUMNS = ("param", "grad", "optim", "buffers", "total")
_TITLES = ("parameters", "gradients", "optimizer", "buffers", "total")


def _row(name: str, entry: dict[str, int]) -> str:
    cells = "".join(f"{entry[column] / 2**20:>14.2f}" for column in _COLUMNS)
    return f"{name:<22}{cells}"


def format_ledger(ledger: dict[str, Any], measured: bool = True) -> str:
    """The ledger as a table, in MiB per rank.

    Args:
        ledger: what `Engine.ledger()` returned.
        measured: also show what the running engine took at most, and its ratio to the prediction.
    """
    running = ledger["strategy"]
    lines = [f"{'MiB per rank (peak)':<22}" + "".join(f"{title:>14}" for title in _TITLES)]
    lines += [
        _row(f"{name} predicted", ledger["predicted"][name])
        for name in ("ddp", "zero1", "zero2", "zero3")
    ]
    if running not in ("ddp", "zero1", "zero2", "zero3"):
        lines.append(_row(f"{running} predicted", ledger["predicted"][running]))
    if measured:
        lines.append(_row(f"{running} measured", ledger["measured"]))
        ratio = ledger["measured"]["total"] / max(1, ledger["predicted"][running]["total"])
        lines.append(f"measured / predicted   {ratio:.3f}")
    if ledger["predicted"][running]["disk"] > 0:
        entry = ledger["measured" if measured else "predicted"]
        disk = entry["disk"] if measured else entry[running]["disk"]
        lines.append(f"{running} on disk{'':<8}{disk / 2**20:>14.2f}")
    if measured and ledger["measured"]["act"] > 0:
        lines.append(f"activations offloaded{ledger['measured']['act'] / 2**20:>15.2f}")
    return "\n".join(lines)
