"""Models of transformers on tensor ranks: what they do with an engine is what they do with plain
torch, without a word about their layers."""

from __future__ import annotations

import functools
from typing import Any

import hugging_face as hf
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(180)

ODD = {"vocab_size": 67}  # which no number of ranks divides


def trains(engine: Any, kind: str, rank: int) -> dict[str, Any]:
    losses = []
    for step in range(3):
        loss = engine(**hf.batch(kind, step, rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    with torch.no_grad():
        seen = engine(**hf.batch(kind, 9, rank)).logits.clone()
    engine.train()
    told = {"losses": losses, "logits": seen}
    if kind in ("bert", "t5"):
        return told
    return told | {"said": engine.generate(**hf.prompts(rank), max_new_tokens=5)}


def compared(kind: str, strategy: str, tensor: int, extra: Any, config: Any) -> dict[str, float]:
    """On a rank: as hf.compared(), where `tensor` ranks have the same samples."""
    rank = dist.get_rank() // tensor
    build = functools.partial(hf.build, **extra)
    model = build(kind)
    ours = hf.told(
        hf.start(strategy, model, config | {"mesh": {"tensor": tensor}}), trains, kind, rank
    )
    theirs = hf.told(hf.Plain(build(kind)), trains, kind, rank)
    return {name: hf.far(ours[name], theirs[name]) for name in theirs}


CASES = [
    ("llama", "zero3", 2, 2, {}, {}),
    ("llama", "zero2", 4, 4, {}, {}),  # more tensor ranks than keys and values
    ("llama", "zero3", 4, 2, ODD, {"activations": {"checkpoint": "unit"}}),
    ("llama", "ddp", 2, 2, ODD | {"tie_word_embeddings": True}, {}),
    ("mistral", "zero1", 2, 2, {}, {}),
    ("qwen3", "zero3", 2, 2, {}, {}),
    ("qwen3", "zero3", 4, 4, ODD, {}),
    ("phi3", "zero3", 2, 2, {}, {}),
    ("gpt2", "zero3", 2, 2, ODD, {}),
    ("gpt2", "zero2", 4, 4, {}, {}),
    ("opt", "zero3", 2, 2, {}, {}),
    ("bert", "zero3", 2, 2, {}, {}),
    ("t5", "zero3", 2, 2, {}, {}),
    ("t5", "zero2", 4, 2, ODD, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])))
def test_trains(case, pools):
    kind, strategy, world, *others = case
    hf.check(pools(world).run(compared, kind, strategy, *others))
