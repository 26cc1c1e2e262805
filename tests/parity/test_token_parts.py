"""Tokens that are cut between layers (`parallel.norms`): what is refused, what is computed whole.
That training is exact is in test_meshes.py."""

from __future__ import annotations

from typing import Any

import hugging_face as hf
import meshes
import pytest
import torch
from ranks import Failure

pytestmark = pytest.mark.timeout(480)


def start(kind: str = "llama", strategy: str = "zero3", **parallel: Any) -> Any:
    import penstock  # noqa: PLC0415

    made = {
        "strategy": strategy,
        "mesh": {"tensor": 2},
        "optimizer": {"type": "AdamW"} | hf.ADAMW,
        "comm": {"timeout_s": 120},
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


def calls_the_first_block() -> None:
    engine = start(strategy="zero2")
    engine.eval()
    with torch.no_grad():
        engine(**of_length(10))
        states = torch.randn(2, 10, engine.module.config.hidden_size)
        engine.module.model.layers[0](states)


class Stack(torch.nn.Module):
    """Blocks with a norm and two layers."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(blocks), torch.nn.Linear(8, 4)
        self.depth = len(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.head(x).square().mean()


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.low, self.high = torch.nn.Linear(8, 2), torch.nn.Linear(2, 16)
        torch.nn.init.zeros_(self.high.weight)  # as LoRA's begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x) + self.high(self.low(x))))
        return out


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(8), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


STACK = {
    "blocks": "tokens",
    "*.mlp": "gather_tokens",
    "*.up": "column",
    "*.high": "column",
    "*.down": "row_tokens",
}


def stack(model: Stack, **rules: str) -> Any:
    import penstock  # noqa: PLC0415

    config = {"strategy": "zero2", "mesh": {"tensor": 2}, "parallel": {"rules": STACK | rules}}
    return penstock.initialize(model, config | {"optimizer": {"type": "SGD", "lr": 0.1}})


def trains_what_no_rule_is_about() -> float:
    """Norms and a thin layer before a cut one: how far from plain torch."""
    torch.manual_seed(0)
    model = Stack([Block(), Block()])
    plain = Stack([Block(), Block()])
    plain.load_state_dict(model.state_dict())
    engine, optimizer = stack(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x))
        engine.step()
        optimizer.zero_grad()
        plain(x).backward()
        optimizer.step()
    ours = engine.state_dict(rank0_only=False)
    engine.close()
    return max(meshes.far(ours[name], one) for name, one in plain.state_dict().items())


def test_what_no_rule_is_about_has_addends(pools):
    assert max(pools(2).run(trains_what_no_rule_is_about)) < 1e-5


def leaves_the_last_block_out() -> None:
    engine = stack(Stack([Block(), Block()]))
    engine.module.depth = 1
    engine(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)))


def has_a_block_twice() -> None:
    block = Block()
    stack(Stack([block, block]))


def says_whole() -> None:
    stack(Stack([Block()]), **{"*.norm": "whole"})


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
    (trains_odd, "Pad sequences to a multiple of 2"),
    (asks_for_hidden_states, "output_hidden_states"),
    (calls_a_block, "called by itself"),
    (calls_the_first_block, "called by itself"),
    (leaves_the_last_block_out, "was not called"),
    (has_a_block_twice, "the same block several times"),
    (says_whole, '"blocks.0.norm" is "whole"'),
    (other_model, "rules exist only for llama"),
    (rules_without, 'no rule in "parallel.rules" has the style "tokens"'),
    (column_outside, '_proj" is "column"'),
]


@pytest.mark.parametrize(("what", "text"), REFUSED, ids=[one.__name__ for one, _ in REFUSED])
def test_refuses(what, text, pools):
    for one in pools(2).attempt(what):
        assert isinstance(one, Failure) and text in one.text, one
