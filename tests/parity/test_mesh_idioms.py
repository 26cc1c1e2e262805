"""What people do around an engine whose ranks compute a model together: torch's, or an error."""

from __future__ import annotations

import collections
from typing import Any

import hugging_face as hf
import pytest
import torch
import torch.distributed as dist
import transformers
from models import fill
from torch import nn

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5
VOCAB, WIDTH, LENGTH, ROWS = 31, 16, 8, 4


def start(model: nn.Module, mesh: dict[str, int], **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    made = {
        "strategy": "zero2",
        "mesh": mesh,
        "optimizer": {"type": "AdamW"} | hf.ADAMW,
        "batch": {"accumulate": 2},
        "units": {"layer_bytes": 1},
        "comm": {"timeout_s": 120},
    }
    return penstock.initialize(model, made | config)


def error_of(body: Any) -> str:
    try:
        body()
    except Exception as error:
        return str(error)
    return "no error"


# ---- exports


def exported(mesh: dict[str, int], folder: str) -> float:
    """How far an export is from the engine's weights, as from_pretrained() reads it."""
    engine = start(hf.build("llama", vocab_size=67, tie_word_embeddings=True), mesh)
    engine.train_batch({name: one[:2] for name, one in hf.batch("llama", 0, 0).items()})
    engine.export_hf(folder, max_shard_bytes=20_000)
    weights = engine.state_dict(rank0_only=False)
    text = repr(engine)
    engine.close()
    dist.barrier()
    model, info = hf.KINDS["llama"][1].from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    count = sum(one.numel() for one in model.parameters())
    assert f"ranks={dist.get_world_size()} parameters={count}" in text
    return hf.far(dict(model.state_dict()), dict(weights))


@pytest.mark.parametrize(
    "mesh", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"sequence": 2}], ids=str
)
def test_an_export_is_whole(mesh, pools, tmp_path):
    world = max(2, len(mesh) * 2)
    assert pools(world).run(exported, mesh, str(tmp_path)) == [0.0] * world


# ---- padding on the left


def padded_on_the_left(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, hf.VOCAB, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 1, 3, 5])[:, None]).long()
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def trains_padded(kind: str, mesh: dict[str, int]) -> float:
    engine, plain = start(hf.build(kind), mesh), hf.build(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), **hf.ADAMW)
    apart = 0.0
    for step in range(3):
        batch = padded_on_the_left(step)
        loss = engine.train_batch(batch)
        parts = [{name: one[i : i + 2] for name, one in batch.items()} for i in (0, 2)]
        wanted = 0.0
        for part in parts:
            own = plain(**part).loss / 2
            own.backward()
            wanted += float(own.detach())
        optimizer.step()
        optimizer.zero_grad()
        apart = max(apart, abs(float(loss) - wanted))
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    trained = plain.state_dict()
    return max(apart, hf.far(weights, {name: trained[name] for name in weights}))


@pytest.mark.parametrize("mesh", [{"sequence": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_on_the_left(kind, mesh, pools):
    assert max(pools(2).run(trains_padded, kind, mesh)) < LIMIT


# ---- torch's own layers


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


RULES = {"tokens": "vocab", "head": "vocab", "*.linear1": "column", "*.linear2": "row"}


def evaluates() -> float:
    """torch's fast path computes with the layers' weights itself."""
    engine, plain = (
        start(fill(Encoder()), {"tensor": 2}, parallel={"rules": RULES}),
        fill(Encoder()),
    )
    batch = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCAB
    with torch.no_grad():
        wanted = float(plain.eval()(batch, batch))
    apart = abs(float(engine.eval_batch((batch, batch))) - wanted)
    engine.close()
    assert engine.module.blocks[0].activation_relu_or_gelu == 1
    return apart


def test_a_fast_path_is_not_taken(pools):
    assert max(pools(2).run(evaluates)) < 1e-6


def cuts_multi_head_attention() -> str:
    rules = RULES | {"*.self_attn.out_proj": "row"}
    return error_of(lambda: start(Encoder(), {"tensor": 2}, parallel={"rules": rules}))


def test_multi_head_attention_is_refused(pools):
    for said in pools(2).run(cuts_multi_head_attention):
        assert "computes with its weights directly" in said


# ---- hooks


def hooks(late: bool) -> str:
    engine = start(fill(Encoder()), {"tensor": 2}, parallel={"rules": RULES})
    weight = engine.module.blocks[0].linear1.weight
    if late:
        weight.register_post_accumulate_grad_hook(lambda param: None)
    else:
        weight.register_hook(lambda gradient: gradient / gradient.norm())
    batch = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    said = error_of(lambda: engine.train_batch((batch, batch)))
    engine.close()
    return said


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_sees_a_part_is_refused(late, pools):
    for said in pools(2).run(hooks, late):
        assert '"blocks.0.linear1.weight" has a hook' in said and "set_grads" in said


# ---- batches and losses


class Told(nn.Module):
    """Gives a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": y.square().mean(), "y": y}


def batches(mesh: dict[str, int]) -> list[Any]:
    engine = start(fill(Told()), mesh)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    told = [
        engine.train_batch({"x": x}).item(),
        engine.train_batch(transformers.BatchEncoding({"x": x})).item(),
        engine.train_batch(collections.UserDict({"x": x})).item(),
    ]
    told.append(error_of(lambda: engine.train_batch(iter([{"x": x}]))))
    told.append(engine.train_batch({"x": x}).item())
    # In a pipeline the stage that computes no loss waits in vain.
    told.append(error_of(lambda: engine.eval_batch({"x": x}, loss_of=lambda out, _: out["y"])))
    engine.close()
    return told


def test_batches_and_losses(pools):
    both = [pools(2).run(batches, mesh) for mesh in ({}, {"pipeline": 2})]
    said = "loss_of(outputs, part) returned a tensor of [2, 16]"
    for rank, (plain, staged) in enumerate(zip(*both, strict=True)):
        assert plain[:3] == pytest.approx(staged[:3], abs=1e-6) and plain[0] > plain[1] > plain[2]
        assert "ended after 1 of the 2 parts" in plain[3]
        assert "ended after 1 of the 2 parts" in staged[3]
        assert plain[4] == pytest.approx(staged[4], abs=1e-6)
        assert said in plain[5] and (rank == 0 or said in staged[5])
