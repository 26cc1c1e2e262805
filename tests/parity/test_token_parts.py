"""Tokens that are cut between layers (`parallel.norms`): what is refused, what is computed whole.
That training is exact is in test_meshes.py."""

from __future__ import annotations

from typing import Any

import hugging_face as hf
import meshes
import pytest
import torch
from ranks import Failure

pytestmark = pytest.mark.timeout(180)


def start(kind: str = "llama", **parallel: Any) -> Any:
    import penstock  # noqa: PLC0415

    made = {
        "strategy": "zero3",
        "mesh": {"tensor": 2},
        "optimizer": {"type": "AdamW"} | hf.ADAMW,
        "comm": {"timeout_s": 30},
        "parallel": {"norms": "tokens"} | parallel,
    }
    return penstock.initialize(hf.build(kind), made)


def of_length(tokens: int) -> Any:
    return {name: one[:, :tokens] for name, one in hf.batch("llama", 0, 0).items()}


def evaluates() -> dict[str, float]:
    """How far losses are from those of a whole model, for lengths that divide and not."""
    engine = start()
    engine.eval()
    plain = hf.build("llama").eval()
    told = {}
    with torch.no_grad():
        for tokens in (10, 9, 1):
            ours = engine(**of_length(tokens)).logits
            told[str(tokens)] = meshes.far(ours, plain(**of_length(tokens)).logits)
    prompts = hf.prompts()
    ours, theirs = (
        one.generate(**prompts, max_new_tokens=4, do_sample=False) for one in (engine, plain)
    )
    told["generate"] = float((ours != theirs).sum())
    engine.close()
    return told


def test_evaluates_any_length(pools):
    for told in pools(2).run(evaluates):
        assert all(value < 1e-6 for value in told.values()), told


def sees() -> set[int]:
    """How many tokens come to norms in blocks."""
    engine = start()
    found = set()
    for block in engine.module.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.register_forward_hook(lambda _norm, given, _out: found.add(given[0].shape[1]))
    engine.backward(engine(**of_length(10)).loss)
    engine.step()
    engine.close()
    return found


def test_norms_have_a_part(pools):
    assert pools(2).run(sees) == [{5}, {5}]


def trains_odd() -> None:
    start()(**of_length(9))


def asks_for_hidden_states() -> None:
    start()(**of_length(10), output_hidden_states=True)


def calls_a_block() -> None:
    engine = start()
    states = torch.randn(2, 10, engine.module.config.hidden_size)
    engine.module.model.layers[1].mlp(states)


def other_model() -> None:
    start("t5")


def rules_without() -> None:
    start(rules={"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column"})


def column_outside() -> None:
    rules = {
        "*layers": "tokens",
        "*.mlp": "gather_tokens",
        "*.self_attn.?_proj": "column",
        "*.mlp.gate_proj": "column",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row_tokens",
        "*norm": "partial",
    }
    start(rules=rules)


REFUSED = [
    (trains_odd, "pad sequences to a multiple of 2"),
    (asks_for_hidden_states, "output_hidden_states"),
    (calls_a_block, "called by itself"),
    (other_model, "known are llama"),
    (rules_without, 'no rule in "parallel.rules" has the style "tokens"'),
    (column_outside, '_proj" is "column"'),
]


@pytest.mark.parametrize(("what", "text"), REFUSED, ids=[one.__name__ for one, _ in REFUSED])
def test_refuses(what, text, pools):
    for one in pools(2).attempt(what):
        assert isinstance(one, Failure) and text in one.text, one
