"""train_batch() and eval_batch(): the step of a loop that is written out, on every mesh."""

from __future__ import annotations

import models
import pytest
import tensor_models
import torch
from ranks import Failure
from test_api import initialize
from training import Case
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, STEPS = 4, 3  # of a data rank's whole batch


def config_of(mesh, accumulate, strategy="zero3"):
    case = Case(strategy, accumulate=accumulate, model="parts", tensor=mesh.get("tensor", 1))
    return case.config() | {"mesh": mesh, "batch": {"accumulate": accumulate}}


def batches(engine):
    whole = models.batches("gpt", STEPS + 1, ROWS * engine.data_size)
    first = ROWS * engine.data_rank
    return [tuple(part[first : first + ROWS] for part in batch) for batch in whole]


def by_hand(mesh, accumulate):
    engine = initialize(models.fill(tensor_models.Parts()), config_of(mesh, accumulate))
    losses = []
    for batch in batches(engine)[:STEPS]:
        total = 0.0
        for part in zip(*(tensor.chunk(accumulate) for tensor in batch), strict=True):
            loss = engine(*part)
            engine.backward(loss)
            engine.step()
            total += float(loss) / accumulate
        losses.append(total)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return losses, weights


def at_once(mesh, accumulate, way):
    engine = initialize(models.fill(tensor_models.Parts()), config_of(mesh, accumulate))
    own = batches(engine)
    parts = iter(
        [
            part
            for batch in own
            for part in zip(*(tensor.chunk(accumulate) for tensor in batch), strict=True)
        ]
    )
    losses = [engine.train_batch(parts if way == "iterator" else batch) for batch in own[:STEPS]]
    assert all(loss.dtype == torch.float32 and loss.dim() == 0 for loss in losses)
    before = engine.steps
    seen = engine.eval_batch(parts if way == "iterator" else own[STEPS])
    assert engine.module.training and engine.steps == before == STEPS
    if way == "iterator":
        with pytest.raises(StopIteration):
            engine.train_batch(parts)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return [float(loss) for loss in losses], float(seen), weights


@pytest.mark.parametrize("way", ["batch", "iterator"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("world", "mesh"), [(1, {}), (2, {}), (2, {"tensor": 2})])
def test_as_by_hand(world, mesh, accumulate, way, pools):
    theirs = pools(world).run(by_hand, mesh, accumulate)
    ours = pools(world).run(at_once, mesh, accumulate, way)
    means = [sum(losses) / world for losses in zip(*(told[0] for told in theirs), strict=True)]
    for losses, seen, weights in ours:
        assert losses == pytest.approx(means, rel=1e-6)
        assert seen == ours[0][1]
        assert all(weights[name].equal(theirs[0][1][name]) for name in weights)


def of_transformers(mesh):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    settings = {"optimizer": {"type": "SGD", "lr": 0.1}, "mesh": mesh, "batch": {"accumulate": 2}}
    engine = initialize(model, settings)
    tokens = torch.randint(40, (4 * 4, 7), generator=torch.Generator().manual_seed(1))
    rows = 16 // engine.data_size
    own = tokens[engine.data_rank * rows :][:rows]
    batch = {"input_ids": own, "labels": own}
    losses = [float(engine.train_batch(batch)) for _ in range(3)]
    losses.append(float(engine.train_batch(batch, lambda out, part: out.loss * 1.0)))
    losses.append(float(engine.eval_batch(batch)))
    engine.close()
    return losses


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"sequence": 2}, {"tensor": 2, "sequence": 2}, {}])
def test_a_script_does_not_change_with_the_mesh(mesh, pools):
    world = 4
    alone = pools(1).run(of_transformers, {})[0]
    for told in pools(world).run(of_transformers, mesh):
        assert told == pytest.approx(alone, rel=1e-5)


def refuses(case):
    engine = initialize(models.fill(tensor_models.Parts()), config_of({}, 2))
    batch = batches(engine)[0]
    given = {
        "rows": tuple(tensor[:3] for tensor in batch),
        "unlike": (batch[0], batch[1][:2]),
        "no loss": batch,
        "ends": iter([tuple(tensor[:2] for tensor in batch)]),
        "too late": batch,
    }[case]
    loss_of = (lambda outputs, part: None) if case == "no loss" else None
    if case == "too late":
        engine.backward(engine(*batch))
    try:
        engine.train_batch(given, loss_of)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("rows", "tensors of [3] rows"),
        ("unlike", "tensors of [2, 4] rows"),
        ("no loss", "loss_of(outputs, part) returned None, not a tensor of one element"),
        ("ends", "ended after 1 of the 2 parts"),
        ("too late", "backwards had already run since the last step"),
    ],
)
def test_refused(case, expected, pools):
    for failure in pools(2).attempt(refuses, case):
        assert isinstance(failure, Failure)
        assert expected in failure.text
