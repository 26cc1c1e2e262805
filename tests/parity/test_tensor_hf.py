"""Models of transformers on tensor ranks: what they do with an engine is what they do with plain
torch, without a word about their layers."""

from __future__ import annotations

import functools
from typing import Any

import hugging_face as hf
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(480)

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


CUT = {"parallel": {"cut_logits": True}}
APART = {"tie_word_embeddings": False}
# [heads, Q|K|V]
OLD = {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}
CASES = [
    ("llama", "zero3", 2, 2, {}, {}),
    ("llama", "zero2", 4, 4, {}, {}),  # more tensor ranks than keys and values
    ("llama", "zero3", 4, 2, ODD, {"activations": {"checkpoint": "unit"}}),
    ("llama", "ddp", 2, 2, ODD | {"tie_word_embeddings": True}, {}),
    ("llama", "zero3", 4, 2, ODD, CUT),
    ("gpt2", "ddp", 2, 2, ODD, CUT),
    ("t5", "zero3", 2, 2, ODD, CUT),
    ("mistral", "zero1", 2, 2, {}, {}),
    ("qwen3", "zero3", 2, 2, {}, {}),
    ("qwen3", "zero3", 4, 4, ODD, {}),
    ("phi3", "zero3", 2, 2, {}, {}),
    ("gpt2", "zero3", 2, 2, ODD, {}),
    ("gpt2", "zero2", 4, 4, {}, {}),
    ("opt", "zero3", 2, 2, {}, {}),
    ("bloom", "zero3", 2, 2, ODD, {}),
    ("bloom", "zero2", 4, 4, {}, {}),
    ("falcon", "zero3", 2, 2, ODD, {}),
    ("falcon", "zero2", 4, 4, {"num_kv_heads": 4} | APART, {}),
    ("falcon", "zero3", 2, 2, OLD | {"parallel_attn": False, "bias": True}, {}),
    ("falcon", "zero2", 4, 4, OLD | APART, {}),
    ("bert", "zero3", 2, 2, {}, {}),
    ("t5", "zero3", 2, 2, {}, {}),
    ("t5", "zero2", 4, 2, ODD, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])))
def test_trains(case, pools):
    kind, strategy, world, *others = case
    hf.check(pools(world).run(compared, kind, strategy, *others))


def kept_and_read(cut: bool) -> dict[str, Any]:
    """On a rank: bytes that a forward keeps for its backward, and what loops do with logits."""
    import penstock  # noqa: PLC0415

    model = hf.build("llama", vocab_size=4099)
    config = {"strategy": "ddp", "mesh": {"tensor": 2}, "parallel": {"cut_logits": cut}}
    engine = penstock.initialize(model, config)
    kept: dict[int, int] = {}

    def count(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    batch = hf.batch("llama", 0, 0)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda one: one):
        outputs = engine(**batch)
    logits, labels = outputs.logits, batch["labels"].clamp_min(0)
    told: dict[str, Any] = {"kept": sum(kept.values()), "shape": tuple(logits.shape)}
    rows = logits[:, :-1, :].reshape(-1, logits.shape[-1])
    other = torch.nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1), reduction="none")
    own = torch.nn.functional.cross_entropy(
        rows, labels[:, 1:].reshape(-1), reduction="sum", label_smoothing=0.1, ignore_index=0
    )
    engine.backward(outputs.loss + other.mean() + own / 7 + logits.float().softmax(-1).std())
    told["gradients"] = engine.full_grads()
    told["best"], told["loss"] = logits.argmax(-1), outputs.loss.detach()
    engine.close()
    return told


def test_cut_logits_are_whole_to_whoever_reads_them(pools):
    cut, whole = (pools(2).run(kept_and_read, one)[0] for one in (True, False))
    assert cut["shape"] == whole["shape"] and torch.equal(cut["best"], whole["best"])
    assert abs(cut["loss"] - whole["loss"]) < 1e-5
    assert set(cut["gradients"]) == set(whole["gradients"])
    for name, one in whole["gradients"].items():
        assert hf.far(cut["gradients"][name], one) < 1e-5, name
    logits = 4 * 4099 * whole["shape"][0] * whole["shape"][1]
    assert whole["kept"] - cut["kept"] > 0.45 * logits  # the other rank's half


def changes_in_place() -> dict[str, Any]:
    """What a loop gets that changes logits which are not there; under autocast, their loss."""
    import penstock  # noqa: PLC0415

    model = hf.build("llama")
    engine = penstock.initialize(model, {"strategy": "ddp", "mesh": {"tensor": 2}} | CUT)
    batch = hf.batch("llama", 0, 0)
    logits = engine(**batch).logits
    changes = {
        "index": lambda: logits.__setitem__((..., 5), -1e4),
        "fill": lambda: logits.masked_fill_(logits > 0, 0.0),
        "subtract": lambda: logits.__isub__(1.0),
        "view": lambda: logits.view(-1, logits.shape[-1]).div_(2.0),
        "hook": lambda: logits.register_hook(lambda grad: 2 * grad),
        "retain": logits.retain_grad,
    }
    told: dict[str, Any] = {}
    for name, change in changes.items():
        try:
            change()
        except RuntimeError as error:
            told[name] = str(error)
    with torch.autocast("cpu", torch.bfloat16):
        rows = engine(**batch).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(rows, batch["labels"].flatten())
    told["dtype"] = loss.dtype
    engine.close()
    return told


def test_cut_logits_change_in_no_place(pools):
    told = pools(2).run(changes_in_place)[0]
    assert told.pop("dtype") == torch.float32
    assert set(told) == {"index", "fill", "subtract", "view", "hook", "retain"}
    assert all("logits = logits.whole()" in text for text in told.values()), told


def refused(kind: str, extra: Any, config: Any, match: str) -> None:
    import penstock  # noqa: PLC0415

    with pytest.raises(penstock.ConfigError, match=match):
        penstock.initialize(
            hf.build(kind, **extra), {"strategy": "ddp", "mesh": {"tensor": 2}} | config
        )


def test_refused(pools):
    pools(2).run(refused, "bert", {}, CUT, "cut_logits.*no Linear has the style")
    exact = {"slow_but_exact": True, "pretraining_tp": 2}
    pools(2).run(refused, "bloom", exact, {}, "slow_but_exact")
    pools(2).run(refused, "falcon", OLD | {"multi_query": True}, {}, "one key and value head")
    pools(2).run(refused, "falcon", OLD | {"alibi": True}, {}, "alibi")
    pools(2).run(refused, "falcon", {"num_kv_heads": 1}, {}, "num_kv_heads.*is not divisible")


def test_cut_logits_need_tensor_ranks():
    import penstock  # noqa: PLC0415

    with pytest.raises(penstock.ConfigError, match=r"parallel\.cut_logits.*nothing is cut"):
        penstock.initialize(hf.build("gpt2"), {"strategy": "ddp"} | CUT)
