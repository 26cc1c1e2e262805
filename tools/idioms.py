"""Writes docs/idioms.md from the table in tests/parity/idioms.

`tools/idioms.py` writes the page. `tools/idioms.py --check` writes nothing and fails if the page is
out of date.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "idioms.md"
HEAD = """# Idioms

Generated from the table in `tests/parity/idioms` by `tools/idioms.py`; do not edit. The page lists
{count} things that people do around a training loop, and what the engine does in each case. A test
checks every row (`tests/parity/test_idioms.py`).

- *As torch*: losses and weights equal those of plain torch in one process on the whole batch.
- *Refused*: in that call, or in the engine's next call, every rank gets an error that says what to
  do instead.
- *As torch or refused*: which of the two happens depends on the model's sizes and on the config
  (strategy, precision, tiers, accumulation, ranks). Run the code once with your model and config.
  If there is no error, the result equals torch's.
- *An error, as in torch*: both torch and the engine raise an error.

On one rank, `zero3` and `hpz` keep parameters whole. So on one rank, a row that only these two
refuse is *as torch or refused*.

## What to call instead

| refused | instead |
|---|---|
| `clip_grad_norm_` | the config's `clip`; after the step, `engine.grad_norm` has the norm |
| reads of `p.grad`: a norm, a log, `isfinite` | `engine.full_grads()`, `engine.grad_norm` |
| writes of `p.grad`: `clip_grad_value_`, noise, surgery, `p.grad = x`, `dist.all_reduce` | \
edit the result of `engine.full_grads()`, which is averaged over ranks, and pass it to \
`engine.set_grads()` |
| `GradScaler` | `"precision": "fp16"`: the engine scales the loss and skips overflowed steps |
| `loss.backward()` with fp16 | `engine.backward(loss)` |
| `backward(create_graph=True)` | \
`torch.autograd.grad(..., create_graph=True)` before the backward |
| `optimizer.step()`, with or without a closure | `engine.step()`, which runs the step hooks |
| reads of `optimizer.state` | `engine.param_state(p, name)`, `engine.local_state(p, name)` |
| `optimizer.state_dict()`, `optimizer.load_state_dict()` | `engine.save()`, `engine.load()` |
| a reset of moments | `engine.set_param_state(p, name, zeros)`, which keeps the step count; or \
`engine.close()` and `initialize()` again |
| an optimizer whose step on one parameter depends on others (LBFGS) | \
AdamW, Adam, SGD, Adagrad, Lion, or a class that steps on each parameter by itself |
| two optimizers for one model | one optimizer with parameter groups |
| an optimizer with a parameter outside the model | \
make the parameter a `Parameter` of the model, or give it a separate optimizer |
| training a parameter that was frozen at `initialize()` | \
freeze the parameter only after `initialize()` |
| reads of a sharded `p`: `p.norm()`, `p.tolist()`, averages | \
`with engine.gathered():` around the reads |
| an L2 penalty on sharded parameters in the loss | the equivalent `weight_decay` of Adam or SGD |
| edits of a sharded `p`: `clamp_`, `load_state_dict`, pruning | \
`with engine.gathered(write=True):` |
| `model.state_dict()`, `torch.save`, `deepcopy` of a sharded model | \
`engine.state_dict()`, or the same call inside `with engine.gathered():` |
| `model.half()`, `.to("meta")`, a new layer or `Parameter`, `assign=True` | \
do this before `initialize()` or after `engine.close()` |
| an evaluation or `state_dict()` on rank 0 alone | the same call on all ranks; `with \
engine.uneven():` around a loop whose length differs between ranks |
| `copy.deepcopy(engine)`, a pickle of it | copy the model inside `with engine.gathered():` |
"""


def group_lines(rows: list[Any]) -> Iterator[str]:
    """Yields a list for each outcome that all strategies share, then a table of the other rows."""
    alike: dict[str, list[str]] = {}
    differ = []
    for row in rows:
        whole, sharded = row.whole.told, row.sharded.told
        if whole == sharded:
            alike.setdefault(whole, []).append(row.name)
        else:
            differ.append(f"| {row.name.replace('|', chr(92) + '|')} | {whole} | {sharded} |")
    for outcome, names in alike.items():
        yield f"\n{outcome[0].upper()}{outcome[1:]}:\n"
        yield from (f"- {name}" for name in names)
    if differ:
        yield "\n| differs by strategy | `ddp` `zero1` `zero2` | `zero3` `hpz` |"
        yield "|---|---|---|"
        yield from differ


def page() -> str:
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    import idioms  # noqa: PLC0415 - the line above makes it importable

    rows = idioms.every()
    groups: dict[str, list[Any]] = {}
    for row in rows.values():
        groups.setdefault(row.group, []).append(row)
    lines = [HEAD.format(count=len(rows)).rstrip()]
    for group, members in groups.items():
        lines += [f"\n## {group}", *group_lines(members)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"idioms: {PAGE.relative_to(ROOT)} differs from the table: run tools/idioms.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
