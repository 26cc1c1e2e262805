"""Sequences in parts over ranks: what an engine trains is what plain torch does with whole ones."""

from __future__ import annotations

import copy
import functools
from typing import Any

import hugging_face as hf
import pytest
import torch
import torch.distributed as dist
from ranks import Failure

from penstock.parallel import sequence_parallel

pytestmark = pytest.mark.timeout(480)


def batch_of(kind: str, step: int, rank: int, length: int, padded: bool) -> dict[str, Any]:
    """Of other lengths than ranks divide, with labels on some ranks' tokens alone."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(hf.END + 1, hf.VOCAB, (2, length), generator=generator)
    labels = tokens.clone()
    labels[0, : length // 2] = -100  # none in the first part of a sequence
    made = {"input_ids": tokens, "labels": labels}
    if padded:
        mask = torch.ones_like(tokens)
        mask[0, :3], mask[1, -4:] = 0, 0
        made |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    return made


def trains(engine: Any, kind: str, rank: int, length: int = 13) -> dict[str, Any]:
    losses = []
    for step in range(4):
        batch = batch_of(kind, step, rank, length - step % 2, step > 1)
        out = engine(**batch, position_ids=None)
        engine.backward(out.loss)
        engine.step()
        losses.append(float(out.loss.detach()))
    engine.eval()
    with torch.no_grad():
        losses.append(float(engine(**batch_of(kind, 9, rank, length, True)).loss))
        assert engine(**batch_of(kind, 9, rank, length, True) | {"labels": None}).loss is None
    said = engine.generate(**hf.prompts(rank), max_new_tokens=4)
    engine.train()
    return {"losses": losses, "said": said}


def compared(kind: str, strategy: str, mesh: Any, extra: Any, config: Any) -> dict[str, float]:
    rank = dist.get_rank() // (mesh.get("tensor", 1) * mesh.get("sequence", 1))
    build = functools.partial(hf.build, **extra)
    ours = hf.told(hf.start(strategy, build(kind), config | {"mesh": mesh}), trains, kind, rank)
    theirs = hf.told(hf.Plain(build(kind)), trains, kind, rank)
    return {name: hf.far(ours[name], theirs[name]) for name in theirs}


S2, S4 = {"sequence": 2}, {"sequence": 4}
RECOMPUTED = {"activations": {"checkpoint": "unit"}}
RING, BOTH = ({"parallel": {"sequence": way}} for way in ("ring", "both"))
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
CASES = [
    ("llama", "zero3", 2, S2, {}, {}),
    ("llama", "zero1", 4, S4, {}, {}),  # more ranks than keys and values
    ("llama", "zero3", 4, S2, {}, RECOMPUTED),  # two data ranks
    ("llama", "zero2", 4, {"sequence": 2, "tensor": 2}, {"vocab_size": 67}, RECOMPUTED),
    ("llama", "hpz", 4, {"sequence": 2, "node": 2}, {}, {}),
    ("llama", "zero3", 2, S2, {}, {"tiling": {"max_bytes": 2048, "loss_tokens": 8}}),
    ("mistral", "ddp", 2, S2, {"sliding_window": 40}, {}),
    ("qwen2", "zero3", 2, S2, {}, {}),
    ("qwen3", "zero3", 2, S2, {}, RECOMPUTED),
    ("phi3", "zero3", 2, S2, {}, {}),
    ("gpt2", "zero3", 4, S4, {}, RECOMPUTED),
    ("llama", "zero3", 2, S2, {}, RING),
    ("llama", "zero1", 4, S4, ONE_HEAD, RING),  # more ranks than heads
    ("llama", "zero3", 4, S2, {}, RING | RECOMPUTED),  # two data ranks
    ("llama", "zero2", 4, {"sequence": 2, "tensor": 2}, {"vocab_size": 67}, RING | RECOMPUTED),
    ("llama", "zero3", 2, S2, {}, RING | {"tiling": {"max_bytes": 2048, "loss_tokens": 8}}),
    ("mistral", "ddp", 2, S2, {"sliding_window": 40}, RING),
    ("qwen2", "hpz", 4, {"sequence": 2, "node": 2}, {}, RING),
    ("qwen3", "zero3", 2, S2, {}, RING | RECOMPUTED),
    ("phi3", "zero3", 2, S2, {}, RING),
    ("gpt2", "zero3", 4, S4, {}, RING | RECOMPUTED),
    ("llama", "zero3", 4, S4, {}, BOTH | RECOMPUTED),  # 2 groups of 2 ranks, for 2 key heads
    ("llama", "zero1", 8, {"sequence": 8}, {}, BOTH),  # 4 groups
    ("gpt2", "zero3", 8, {"sequence": 8}, {}, BOTH),  # 2 groups of 4
    ("qwen3", "zero2", 8, S4, {}, BOTH),  # 2 data ranks
    ("gpt2", "zero1", 8, {"sequence": 4, "tensor": 2}, {}, BOTH),
    ("gpt2", "ddp", 4, S4, {"n_head": 1}, BOTH),  # a ring
    ("phi3", "zero3", 2, S2, {}, BOTH),  # heads
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (*case[:4], *case[5]))))
def test_trains(case, pools):
    kind, strategy, world, *others = case
    hf.check(pools(world).run(compared, kind, strategy, *others))


def under_autocast() -> float:
    """How far a loss is from that of plain torch, in units of it."""
    engine = hf.start("zero1", hf.build("llama"), {"mesh": S4} | RING)
    batch = batch_of("llama", 0, 0, 12, True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = engine(**batch).loss
        theirs = hf.build("llama")(**batch).loss
    engine.backward(ours)
    engine.close()
    return float((ours / theirs - 1).abs().detach())


def longest() -> float:
    """As many tokens as the model has positions, which the ranks do not divide."""
    extra = {"n_positions": 13}
    engine = hf.start("zero1", hf.build("gpt2", **extra), {"mesh": S4} | RING)
    batch = batch_of("gpt2", 0, 0, 13, False)
    ours = float(engine(**batch).loss.detach())
    engine.close()
    return abs(ours - float(hf.build("gpt2", **extra)(**batch).loss.detach()))


def test_padding_needs_no_positions(pools):
    assert max(pools(4).run(longest)) < 1e-5


def test_a_ring_under_autocast(pools):
    assert max(pools(4).run(under_autocast)) < 1e-2


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_chunks_of_groups(groups, size):
    ours = object.__new__(sequence_parallel.SequenceParallel)
    ours._num_neighbours, ours._num_groups = size, groups
    per_rank = [ours._chunks_of(index) for index in range(groups * size)]
    for group in range(groups):
        chunks = sum(per_rank[group * size : (group + 1) * size], [])
        early, late = group * size, (2 * groups - 1 - group) * size
        assert chunks == [*range(early, early + size), *range(late, late + size)]
    assert all(len(chunks) == 2 for chunks in per_rank)


# ---- what cannot be cut


def other_sequences(engine):
    engine(**batch_of("llama", dist.get_rank(), 0, 12, False))


def by_place(engine):
    engine(batch_of("llama", 0, 0, 12, False)["input_ids"])


def of_four_dimensions(engine):
    engine(**batch_of("llama", 0, 0, 12, False) | {"attention_mask": torch.ones(2, 1, 12, 12)})


def packed(engine):
    positions = torch.cat([torch.arange(6), torch.arange(6)]).expand(2, -1)
    engine(**batch_of("llama", 0, 0, 12, False) | {"position_ids": positions})


def unknown(engine):
    engine(**batch_of("llama", 0, 0, 12, False) | {"cache_position": torch.arange(12)})


def the_model_itself(engine):
    engine.module(**batch_of("llama", 0, 0, 12, False))


def both_ways(engine):
    engine.module.config.is_causal = False
    engine(**batch_of("llama", 0, 0, 12, False), is_causal=False)


def dropped(engine):
    engine(**batch_of("llama", 0, 0, 12, False))


def refused(story: Any, config: Any, extra: Any) -> str:
    model = hf.build("llama", **extra)
    try:
        engine = hf.start("zero3", model, {"mesh": {"sequence": 2}} | config)
    except ValueError as error:
        assert model.config._attn_implementation in ("sdpa", "eager")
        return str(error)
    try:
        story(engine)
        return "nothing"
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        engine.close()
        assert model.config._attn_implementation == "sdpa"


LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = [
    (packed, {}, {"rope_parameters": LONG}, "depends on the sequence length"),
    (other_sequences, {}, {}, "have parts of the same sequences"),
    (by_place, {}, {}, "pass inputs by name"),
    (of_four_dimensions, {}, {}, "attention_mask has 4 dims"),
    (packed, {}, {}, "position_ids that restart"),
    (unknown, {}, {}, '"cache_position" cannot be cut'),
    (the_model_itself, {}, {}, "Call the engine, not the model"),
    (packed, {}, {"attn_implementation": "eager"}, 'attention is "eager"'),
    (packed, {}, ONE_HEAD, "has 1 attention heads"),
    (both_ways, {}, {}, "only causal attention is supported"),
    (both_ways, RING, {}, "only causal attention is supported"),
    (packed, RING, {}, "position_ids that restart"),
    (other_sequences, RING, {}, "have parts of the same sequences"),
    (by_place, RING, {"attention_dropout": 0.1}, "pass inputs by name"),
    (dropped, RING, {"attention_dropout": 0.1}, "dropout of attention weights, which a ring"),
]


@pytest.mark.parametrize(("story", "config", "extra", "expected"), REFUSED)
def test_refused(story, config, extra, expected, pools):
    for said in pools(2).run(refused, story, config, extra):
        assert expected in said, said


def another_model() -> str:
    import penstock  # noqa: PLC0415

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    penstock.initialize(model, {"mesh": {"sequence": 2}})
    return "nothing"


def test_other_models_are_refused(pools):
    for failure in pools(2).attempt(another_model):
        assert isinstance(failure, Failure)
        assert "the model is a Sequential" in failure.text


def copied(strategy: str) -> float:
    """A copy of the model is a plain one, while the engine is open and after."""
    engine = hf.start(strategy, hf.build("llama"), {"mesh": {"sequence": 2}})
    with engine.gathered():
        other = copy.deepcopy(engine.module)
    batch = batch_of("llama", 0, 0, 12, True)
    expected = float(hf.build("llama")(**batch).loss)
    first = abs(float(other(**batch).loss) - expected)
    engine.close()
    return max(first, abs(float(other(**batch).loss) - expected))


def test_a_copy_is_plain(pools):
    assert max(pools(2).run(copied, "zero3")) <= hf.LIMIT
