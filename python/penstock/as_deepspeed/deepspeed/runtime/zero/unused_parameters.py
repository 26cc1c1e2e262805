"""The check that zero_optimization.ignore_unused_parameters switches off."""

from __future__ import annotations

from typing import Any

from penstock.front import module_tree

from ..._refusal import DeepSpeedRefusal
from .partition_parameters import _on_any_rank


def refuse_unused(engine: Any) -> None:
    """Raises an error if a trainable parameter got no gradient on any rank in this window.

    It checks only at stages 1 and 2, and only if the key is false. With the error, the window is
    dropped. All ranks must call it.
    """
    if engine._config.zero_optimization_stage not in (1, 2):
        return
    if engine.zero_ignore_unused_parameters():
        return
    params = [*module_tree.params_of(engine._model)]
    used = _on_any_rank([one.grad is not None for _, one in params])
    both = zip(params, used, strict=True)
    unused = [name for (name, one), is_used in both if one.requires_grad and not is_used]
    if not unused or not any(used):  # without any gradient the engine's own error says more
        return
    engine.native.zero_grad()
    if engine._stepping:  # the next micro-batch begins a new window
        engine.micro_steps += 1
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    raise DeepSpeedRefusal(
        f"[deepspeed::step] in step {engine.global_steps + 1} these parameters got no gradient on "
        f"any rank: {', '.join(unused[:3])}{more}. "
        f'"zero_optimization.ignore_unused_parameters" is false, so all trainable parameters must '
        f"take part in the loss: freeze these, or set the key to true"
    )
