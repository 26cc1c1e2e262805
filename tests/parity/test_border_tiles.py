"""At the border with users' code: a hook that would see the gradient of a weight in tiles, which is
never whole, is refused by name.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import models
import pytest
from ranks import Failure

TILING = {"max_bytes": 3100}
NAMES = ["tokens.weight", "head.weight"]


def _node(weight):
    return weight.expand_as(weight).grad_fn.next_functions[0][0]


def _on_node(weight):
    node = _node(weight)
    return node, node.register_hook(lambda *_: None)


def _before_node(weight):
    node = _node(weight)
    return node, node.register_prehook(lambda *_: None)


def _on_tensor(weight):
    return None, weight.register_hook(lambda *_: None)


def _after(weight):
    return None, weight.register_post_accumulate_grad_hook(lambda *_: None)


HOOKS = {"node": _on_node, "before node": _before_node, "tensor": _on_tensor, "after": _after}


def hooked(how, name, when, loss_tokens):
    import penstock  # noqa: PLC0415

    model = models.fill(models.Gpt(tied=False))
    weight = model.get_parameter(name)
    kept = [HOOKS[how](weight)] if when == "initialize" else []
    engine = penstock.initialize(
        model, {"strategy": "zero3", "tiling": TILING | {"loss_tokens": loss_tokens}}
    )
    try:
        batch = models.batches("gpt", 1, 2)[0]
        if when == "forward":
            kept.append(HOOKS[how](weight))
        loss = engine(*batch)
        if when == "backward":
            kept.append(HOOKS[how](weight))
        if when == "removed":
            _, handle = HOOKS[how](weight)
            handle.remove()
        engine.backward(loss)
        engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("when", ["initialize", "forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", HOOKS)
def test_hooked(how, name, when, pools):
    for failure in pools(1).attempt(hooked, how, name, when, 0, timeout=240):
        assert isinstance(failure, Failure), failure
        assert f'[front::{when}] parameter "{name}" has a gradient hook' in failure.text


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_hooked_head(when, pools):
    """Its logits are lazy."""
    for failure in pools(1).attempt(hooked, "node", NAMES[1], when, 5, timeout=240):
        assert isinstance(failure, Failure) and "has a gradient hook" in failure.text


@pytest.mark.parametrize("how", HOOKS)
def test_removed(how, pools):
    pools(1).run(hooked, how, NAMES[0], "removed", 0, timeout=240)
