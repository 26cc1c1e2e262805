"""Trains with every optimizer class of a package, sharded and in plain torch.

    pip install --no-deps --target FOLDER pytorch_optimizer
    .venv/bin/python tests/weekly/optimizer_package.py FOLDER [--only NAME ...]

Each class of `pytorch_optimizer` that plain torch can build with its defaults takes 8 steps on two
ranks under zero1 and zero3. Its weights must be equal to those of plain torch, or the engine must
refuse it, at initialize() or at a call. The command prints a table, and exits with 1 if an
optimizer is silently different (or fails otherwise), and with 0 if FOLDER has no such package.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pathlib
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))

import torch
import torch.distributed as dist
from ranks import Failure, Pools, RankError
from torch import nn

PACKAGE = "pytorch_optimizer"
WORLD, STEPS = 2, 8
STRATEGIES = ("zero1", "zero3")
# The allowed difference, relative to the distance that plain torch moves the weights. Gradients of
# both sides differ in their last bits only; an optimizer that treats slices otherwise differs by
# percents.
LIMIT = 1e-3

Weights = dict[str, torch.Tensor]


class Net(nn.Module):
    """Parameters of one to four dimensions, and of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 21), nn.Linear(21, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(x).flatten(1))
        return self.down(torch.tanh(self.up(hidden))).square().mean()


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, 4, 4, generator=generator)


def of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def classes(folder: str) -> dict[str, type[torch.optim.Optimizer]]:
    """The package's optimizer classes by name."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    package = importlib.import_module(PACKAGE)
    return {
        name: one
        for name, one in sorted(vars(package).items())
        if inspect.isclass(one)
        and issubclass(one, torch.optim.Optimizer)
        and one.__module__.startswith(PACKAGE)
    }


def mode(optimizer: Any, name: str) -> None:
    """Calls train() or eval() of a schedule-free optimizer."""
    if callable(getattr(optimizer, name, None)):
        getattr(optimizer, name)()


def plain(made: type[torch.optim.Optimizer]) -> Weights:
    model = build()
    torch.manual_seed(5)
    optimizer = made(model.parameters())
    mode(optimizer, "train")
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(batch(step, rank)) / WORLD).backward()
        optimizer.step()
    mode(optimizer, "eval")
    return of(model)


def sharded(folder: str, name: str, strategy: str) -> tuple[str, Weights]:
    """On a rank: where the engine refused and why, or "" and the weights."""
    import penstock  # noqa: PLC0415

    warnings.simplefilter("ignore")
    model, where, engine = build(), "initialize", None
    config = {"strategy": strategy, "units": {"modules": ["Linear"]}, "comm": {"timeout_s": 30}}
    torch.manual_seed(5)
    try:
        given = classes(folder)[name](model.parameters())
        engine = penstock.initialize(model, config, optimizer=given)
        where = "train()"
        mode(engine.optimizer, "train")
        where = "step()"
        for step in range(STEPS):
            engine.backward(engine(batch(step, dist.get_rank())))
            engine.step()
        where = "eval()"
        mode(engine.optimizer, "eval")
        with engine.gathered():
            return "", of(model)
    except (penstock.ConfigError, penstock.RuntimeFault) as error:
        return f"at {where}: {error}", {}
    finally:
        if engine is not None:
            engine.close(gather=False)


def distance(one: Weights, other: Weights) -> float:
    return float(sum((one[name] - other[name]).double().square().sum() for name in one)) ** 0.5


@dataclass
class Row:
    """The outcome of a class: "equal", "refused", "silent", or "plain torch fails"."""

    name: str
    outcome: str
    note: str = ""


def judged(theirs: Weights, outcomes: list[Any]) -> tuple[str, str]:
    if any(isinstance(one, Failure) for one in outcomes):
        failure = next(one for one in outcomes if isinstance(one, Failure))
        return "silent", f"an error without advice: {failure.kind}: {failure.text}"
    refusals = [told for told, _ in outcomes if told]
    if refusals:
        return "refused", refusals[0]
    went = distance(theirs, of(build()))
    apart = max(distance(ours, theirs) for _, ours in outcomes)
    if apart <= LIMIT * went or went == 0:
        return "equal", ""
    return "silent", f"apart by {apart:.3g} after plain torch went {went:.3g}"


def tried(pools: Pools, folder: str, name: str, made: type[torch.optim.Optimizer]) -> Row:
    try:
        theirs = plain(made)
        if not all(value.isfinite().all() for value in theirs.values()):
            return Row(name, "plain torch fails", "the weights are not finite")
    except Exception as error:  # noqa: BLE001 - for example another argument is needed
        return Row(name, "plain torch fails", f"{type(error).__name__}: {error}")
    found = {}
    for strategy in STRATEGIES:
        try:
            outcomes = pools(WORLD).attempt(sharded, folder, name, strategy, timeout=90)
        except RankError as error:
            return Row(name, "silent", f"{strategy}: {error}")
        found[strategy] = judged(theirs, outcomes)
    for outcome in ("silent", "refused"):
        notes = [f"{s} {note}" for s, (told, note) in found.items() if told == outcome]
        if notes:
            return Row(name, outcome, notes[0])
    return Row(name, "equal")


def short(note: str) -> str:
    line = " ".join(note.split())
    return line if len(line) <= 150 else line[:147] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help=f"into which pip installed {PACKAGE}")
    parser.add_argument("--only", nargs="*", help="names of classes; default: all")
    options = parser.parse_args()
    folder = str(pathlib.Path(options.folder).resolve())
    if not (pathlib.Path(folder) / PACKAGE).is_dir():
        print(f"[weekly] skipped: {folder} has no {PACKAGE}. Run pip install --no-deps --target")
        return 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pools, rows = Pools(), []
    try:
        for name, made in classes(folder).items():
            if options.only and name not in options.only:
                continue
            rows.append(tried(pools, folder, name, made))
            print(f"{name:24} {rows[-1].outcome:18} {short(rows[-1].note)}", flush=True)
    finally:
        pools.close()
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 1 if counts["silent"] else 0


if __name__ == "__main__":
    import optimizer_package  # so that ranks find its functions by this name

    sys.exit(optimizer_package.main())
