"""Layers in tiles: the same training as with whole layers, in less memory."""

from __future__ import annotations

import dataclasses
import functools

import compare
import models
import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn
from training import Case

STEPS = 20


class Wide(nn.Module):
    """An embedding with padding and an MLP whose layers are far larger than the rest."""

    def __init__(self, recompute: str = "off"):
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(models.VOCAB, models.WIDTH, padding_idx=3)
        self.up, self.down = nn.Linear(models.WIDTH, 403), nn.Linear(403, models.WIDTH)
        self.norm = nn.LayerNorm(models.WIDTH)
        self.lm_head = nn.Linear(models.WIDTH, models.VOCAB)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = models.run_block(self.mlp, self.tokens(tokens), self.recompute)
        logits = self.lm_head(self.mlp(x))  # the layers are used twice
        return F.cross_entropy(
            logits[..., :-1, :].reshape(-1, models.VOCAB), targets[..., :-1].reshape(-1)
        )


def build(name: str) -> nn.Module:
    kind, _, recompute = name.partition("-")
    make = {"tied": models.Gpt, "untied": functools.partial(models.Gpt, tied=False), "wide": Wide}
    return models.fill(make[kind](recompute or "off"))


# Model, tiling; strategy, precision, accumulate, world.
SPLIT = {"max_bytes": 3100}
CHUNKS = {"loss_tokens": 5}
BOTH = SPLIT | CHUNKS
CASES = [
    ("tied", SPLIT, "ddp", "fp32", 1, 2),
    ("tied", BOTH, "ddp", "bf16", 3, 1),
    ("untied", BOTH, "zero1", "fp32", 1, 3),
    ("tied", SPLIT, "zero1", "fp32", 3, 2),
    ("tied", BOTH, "zero2", "bf16", 3, 2),
    ("wide", BOTH, "zero2", "fp32", 1, 1),
    ("tied", SPLIT, "zero3", "fp32", 1, 1),
    ("tied", BOTH, "zero3", "fp32", 3, 2),
    ("tied-nonreentrant", BOTH, "zero3", "fp32", 1, 3),
    ("untied", CHUNKS, "zero3", "fp32", 1, 2),
    ("untied", SPLIT, "zero3", "bf16", 1, 3),
    ("untied", BOTH, "zero3", "fp16", 1, 2),
    ("wide", BOTH, "zero3", "fp32", 3, 2),
    ("wide", SPLIT, "zero3", "bf16", 1, 2),
    ("wide-nonreentrant", BOTH, "zero3", "fp32", 1, 2),
    ("wide-reentrant", BOTH, "zero3", "fp32", 1, 3),
    ("untied", BOTH, "mics", "fp32", 1, 4),
    ("tied", BOTH, "hpz", "fp32", 3, 4),
]


def name_of(chosen):
    model, tiling, strategy, precision, accumulate, world = chosen
    return f"{model}-{'+'.join(tiling)}-{strategy}-{precision}-accumulate{accumulate}-world{world}"


def train(
    case: Case, name: str, tiling: dict, prefetch: int, offload: dict | None = None
) -> tuple[training.Run, dict, dict]:
    """On a rank: the run, the model as close() leaves it, and the ledger."""
    import penstock  # noqa: PLC0415

    model = build(name)
    before = dict(model.named_parameters())
    forwards = {key: module.forward for key, module in model.named_modules()}
    config = case.config() | {"tiling": tiling, "prefetch_bytes": prefetch}
    config |= {"units": {}, "offload": offload or {}}
    engine = penstock.initialize(model, config)
    run = training.Run()
    for step, batch in enumerate(models.batches("gpt", STEPS, case.samples)):
        run.losses.append(training.backwards(engine, batch, case.accumulate))
        if step == 0:
            run.gradients = engine.full_grads()
        assert engine.step()
        run.norms.append(engine.grad_norm)
    run.weights = engine.state_dict()
    ledger = engine.ledger()
    engine.close()
    assert all(own is before[key] for key, own in model.named_parameters())
    for key, module in model.named_modules():
        assert module.forward == forwards[key], "close() left a forward behind"
    return run, {k: v.detach().float() for k, v in model.named_parameters()}, ledger


@pytest.mark.parametrize("chosen", CASES, ids=name_of)
def test_tiles_train_as_the_whole(chosen, pools, largest):
    name, tiling, *axes = chosen
    case = Case(*axes)
    prefetch = 0 if case.world == 2 else 8000
    whole = pools(case.world).run(train, case, name, {}, prefetch)
    tiles = pools(case.world).run(train, case, name, tiling, prefetch)
    ours, theirs = tiles[0][0], whole[0][0]
    assert list(ours.weights) == list(theirs.weights)
    assert all(run.norms == ours.norms for run, *_ in tiles), "ranks differ"
    for _, left, _ in tiles:
        for key, value in left.items():
            assert value.equal(ours.weights[key].to(training.DTYPES[case.precision]).float()), key
    if case.precision == "fp32":
        compare.check(largest, "tiles", compare.FP32_LIMITS, compare.fp32_deviations(ours, theirs))
    else:
        wide = dataclasses.replace(case, precision="fp32")
        plain = pools(case.world).run(train, wide, name, {}, prefetch)[0][0]
        start = {k: p.detach() for k, p in build(name).named_parameters() if p.requires_grad}
        own = compare.bf16_deviations(theirs, plain, start)
        limits = {n: compare.BF16_RATIO * d + compare.FP16_SLACK[n] for n, d in own.items()}
        compare.check(largest, case.precision, limits, compare.bf16_deviations(ours, plain, start))
    predicted, measured = tiles[0][2]["predicted"][case.strategy], tiles[0][2]["measured"]
    assert measured["total"] <= 1.1 * predicted["total"]


ON_DISK = {"optimizer": "disk", "params": "disk", "gradients": "disk", "window_bytes": 1}
TIERS = [
    ("tied", BOTH, "zero3", "fp32", 3, 2, ON_DISK | {"late_update": True}),
    ("untied", BOTH, "mics", "fp32", 1, 4, ON_DISK),
    ("wide-nonreentrant", BOTH, "zero3", "fp32", 1, 2, ON_DISK),
    ("wide", BOTH, "zero3", "bf16", 3, 2, {"optimizer": "host", "params": "host"}),
    ("wide-reentrant", SPLIT, "hpz", "fp32", 1, 4, {"optimizer": "disk", "params": "host"}),
]


@pytest.mark.parametrize("chosen", TIERS, ids=lambda chosen: name_of(chosen[:-1]))
def test_bits_of_tiles_are_those_of_memory(chosen, pools, tmp_path):
    name, tiling, *axes, offload = chosen
    case = Case(*axes)
    if "disk" in offload.values():
        offload = offload | {"path": str(tmp_path)}
    memory = pools(case.world).run(train, case, name, tiling, 8000)
    ours = pools(case.world).run(train, case, name, tiling, 8000, offload)
    for (run, left, _), (expected, wanted, _) in zip(ours, memory, strict=True):
        assert (run.losses, run.norms) == (expected.losses, expected.norms)
        for key, value in left.items():
            assert value.equal(wanted[key]), key


class Big(nn.Module):
    """Nothing but an embedding and a head that are far larger than all activations."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(4096, 64)
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.tokens(tokens)).flatten(0, 1), targets.flatten())


def peaks(tied: bool, tiling: dict) -> tuple[dict, dict]:
    import penstock  # noqa: PLC0415

    model = Big()
    if tied:
        model.head.weight = model.tokens.weight
    settings = {"prefetch_bytes": 0, "comm": {"bucket_bytes": 0}, "optimizer": {"type": "SGD"}}
    engine = penstock.initialize(model, {"tiling": tiling} | settings)
    for batch in models.batches("gpt", 3, 2):
        engine.backward(engine(*batch))
        engine.step()
    ledger = engine.ledger()
    engine.close()
    return ledger["predicted"]["zero3"], ledger["measured"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_tile_is_gathered_at_a_time(tied, pools):
    weight, tile = 4096 * 64 * 4, 4096 * 64 * 4 // 16
    shards = weight // 2 * (1 if tied else 2)
    _, whole = pools(2).run(peaks, tied, {})[0]
    predicted, tiles = pools(2).run(peaks, tied, {"max_bytes": tile, "loss_tokens": 8})[0]
    assert whole["param"] >= shards + weight
    assert tiles["param"] <= 1.1 * (shards + tile)
    assert tiles["total"] <= 1.1 * predicted["total"]
    assert predicted["total"] <= 1.1 * tiles["total"]


def built_in_pieces(tiling: dict) -> tuple[training.Tensors, list[float]]:
    import penstock  # noqa: PLC0415

    torch.manual_seed(5)
    with penstock.init():
        model = models.Gpt()
    engine = penstock.initialize(model, {"tiling": tiling, "optimizer": {"eps": 1e-4}})
    start, losses = engine.state_dict(), []
    for batch in models.batches("gpt", 3, 4):
        losses.append(training.backwards(engine, batch, 1))
        engine.step()
    engine.close()
    return start, losses


def test_parameters_built_in_pieces(pools):
    for ours, theirs in zip(
        pools(2).run(built_in_pieces, BOTH), pools(2).run(built_in_pieces, {}), strict=True
    ):
        assert ours[0].keys() == theirs[0].keys()
        assert all(value.equal(theirs[0][name]) for name, value in ours[0].items())
        assert compare.relative(ours[1], theirs[1]) <= compare.SCALAR_LIMIT
