"""Writes docs/idioms.md from the table in tests/parity/idioms.

`tools/idioms.py` writes the page; `tools/idioms.py --check` fails where it is not up to date.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "idioms.md"
HEAD = """# Idioms

Made from the table in `tests/parity/idioms` by `tools/idioms.py`; do not edit. {count} things that
people do to a model, an optimizer, a parameter, a gradient, a hook or a module around a training
loop, and what comes of each with an engine. Every row is a test (`tests/parity/test_idioms.py`).

- *as torch*: losses and weights are those of plain torch in one process on the whole batch.
- *refused*: every rank gets an error, there or at the engine's next call, that says what to do.
- *as torch or refused*: one of the two, never a third result. Which of them depends on the model's
  sizes and on the config (strategy, precision, tiers, accumulation, ranks): run it once with yours.
  No error means that the result is torch's.
- *an error, as in torch*: torch raises, and so does the engine.

A strategy that shards parameters has them whole on one rank: rows that only it refuses are then as
torch or refused.

## What to call instead

| refused | instead |
|---|---|
| `clip_grad_norm_` | the config's `clip`; the norm is `engine.grad_norm` after the step |
| `p.grad` read: a norm, a log, `isfinite` | `engine.full_grads()`, `engine.grad_norm` |
| `p.grad` written: `clip_grad_value_`, noise, surgery, `p.grad = x`, `dist.all_reduce` | \
`engine.set_grads(edited)` of what `engine.full_grads()` gave; ranks are averaged already |
| `GradScaler` | `"precision": "fp16"`: the engine scales the loss and skips steps that overflow |
| `loss.backward()` with fp16 | `engine.backward(loss)` |
| `backward(create_graph=True)` | `torch.autograd.grad(..., create_graph=True)` before it |
| `optimizer.step()`, also with a closure | `engine.step()`; hooks of the optimizer's step run |
| `optimizer.state`, `optimizer.state_dict()` | \
nothing yet: the state is sharded and cannot be saved |
| moments reset | `engine.close()` and `initialize()` again |
| LBFGS, Adafactor and others that are not elementwise | AdamW, Adam, SGD, Adagrad, Lion or an \
elementwise class |
| two optimizers for one model | one optimizer with parameter groups |
| a parameter beside the model in the optimizer | \
a `Parameter` of the model, or an optimizer of its own |
| frozen at `initialize()`, trained later | initialize with it trainable, freeze it afterwards |
| a sharded `p` read: `p.norm()`, `p.tolist()`, averages | `with engine.gathered():` around it |
| an L2 penalty of sharded parameters in the loss | `weight_decay` of Adam or SGD, which is that |
| a sharded `p` edited: `clamp_`, `load_state_dict`, pruning | `with engine.gathered(write=True):` |
| `model.state_dict()`, `torch.save`, `deepcopy` of a sharded model | \
`engine.state_dict()`, or any of them inside `with engine.gathered():` |
| `model.half()`, `.to("meta")`, a new layer or `Parameter`, `assign=True` | \
before `initialize()`, or after `engine.close()` |
| an evaluation or `state_dict()` on rank 0 alone | on all ranks; around uneven loops \
`with engine.uneven():` |
| `copy.deepcopy(engine)`, a pickle of it | of the model, inside `with engine.gathered():` |
"""


def page() -> str:
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    import idioms  # noqa: PLC0415 - its place is known only now

    rows = idioms.every()
    lines = [HEAD.format(count=len(rows))]
    group = ""
    for row in rows.values():
        if row.group != group:
            group = row.group
            lines += [
                f"\n## {group}\n",
                "| | `ddp` `zero1` `zero2` | `zero3` `hpz` |",
                "|---|---|---|",
            ]
        name = row.name.replace("|", "\\|")
        lines.append(f"| {name} | {row.whole.told} | {row.sharded.told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"idioms: {PAGE.relative_to(ROOT)} is not what the table says: run tools/idioms.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
