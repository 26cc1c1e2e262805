"""The ledger's activations have the sizes that torch's rules give, on any mesh."""

from __future__ import annotations

import copy
from typing import Any

import hugging_face as hf
import pytest
import torch
from torch import nn

WIDTH, LAYERS, ROWS = 256, 6, 2048
KEPT = ROWS * WIDTH * 4  # bytes of one fp32 tensor of a micro-batch


class Blocks(nn.Module):
    """Each block keeps the input of its Linear and the input of its GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def start(model: nn.Module, **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    settings = {"strategy": "zero3", "optimizer": {"type": "SGD", "lr": 0.1}}
    return penstock.initialize(model, settings | config)


def train(engine: Any, steps: int, rows: int = ROWS) -> list[dict[str, Any]]:
    """The ledger's entries of the strategy after each step."""
    found = []
    for _ in range(steps):
        for _ in range(engine.config.batch.accumulate):
            engine.backward(engine(torch.ones(rows, WIDTH)))
            engine.step()
        found.append(entry(engine))
    return found


def entry(engine: Any) -> dict[str, Any]:
    ledger = engine.ledger()
    return {
        **ledger["predicted"][ledger["strategy"]],
        "measured": ledger["measured"]["activations"],
    }


def entries(config: dict[str, Any]) -> list[dict[str, Any]]:
    engine = start(Blocks(), **config)
    found = train(engine, 3)
    engine.close()
    return found


# Two tensors per block at the end of the forward, where backward begins.
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_a_forward_keeps(strategy, accumulate, pools):
    config = {"strategy": strategy, "batch": {"accumulate": accumulate}}
    for first, second, third in pools(2).run(entries, config):
        assert first["activations"] == first["step_memory"] == 0, "known after step two"
        assert second == third | {"exchanges": second["exchanges"]}
        expected = 2 * LAYERS * KEPT
        assert expected < third["activations"] < 1.25 * expected
        # The prediction takes all micro-batches to be like the last one, before which the user's
        # loop makes the next inputs within the window.
        over = third["activations"] - third["measured"]
        assert abs(over) < KEPT / 4 if accumulate == 1 else 0.8 * KEPT < over < 1.2 * KEPT
        assert third["step_memory"] >= third["activations"] + third["memory"] / 4
        assert third["step_memory"] <= third["activations"] + third["memory"]
        assert third["step_device"] == third["step_memory"]  # on the CPU


def test_recomputation_keeps_inputs_alone(pools):
    config = {"activations": {"checkpoint": "unit"}}
    for *_, last in pools(2).run(entries, config):
        # The inputs of all blocks, and the two tensors of the block that is recomputed.
        expected = (LAYERS + 2) * KEPT
        assert expected < last["activations"] < 1.4 * expected


def all_tables() -> dict[str, Any]:
    engine = start(Blocks(), strategy="zero1", optimizer={"type": "AdamW"})
    train(engine, 2)
    predicted = engine.ledger()["predicted"]
    engine.close()
    return dict(predicted)


def test_a_table_that_is_not_in_use_has_them_too(pools):
    tables = pools(2).run(all_tables)[0]
    assert len({entry["activations"] for entry in tables.values()}) == 1
    assert tables["zero3"]["step_memory"] < tables["ddp"]["step_memory"]


def in_a_pipeline(schedule: str, virtual_stages: int = 1) -> dict[str, Any]:
    engine = start(
        hf.build("gpt2", n_embd=128, n_layer=4, n_positions=128),
        strategy="zero1",
        mesh={"pipeline": 2},
        parallel={"schedule": schedule, "virtual_stages": virtual_stages},
        batch={"accumulate": 4},
    )
    tokens = torch.randint(hf.VOCAB, (16, 128), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        engine.train_batch({"input_ids": tokens, "labels": tokens})
    found = entry(engine)
    engine.close()
    return found


# The first stage of 1f1b holds two micro-batches at once, that of gpipe all four.
def test_stages_hold_what_their_schedule_says(pools):
    gpipe = pools(2).run(in_a_pipeline, "gpipe")
    one = pools(2).run(in_a_pipeline, "1f1b")
    assert 1.6 < gpipe[0]["activations"] / one[0]["activations"] < 2.2
    for each in [*gpipe, *one]:
        assert abs(each["measured"] / each["activations"] - 1) < 0.1, each


# ---- at the border


class Late(nn.Module):
    """Parameters of the root alone, and a backward that needs more than the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each expanded value is a view, whose gradient has all elements.
        return (x * self.weight).sum(0).expand(4 * ROWS, WIDTH).cos().sum()


def late() -> dict[str, Any]:
    engine = start(Late(), strategy="ddp")
    found = train(engine, 2)[-1]
    engine.close()
    return found


# The cosine of 4 rows for each row, and at the end of the backward its gradient and products.
def test_the_end_of_a_backward_counts(pools):
    for found in pools(2).run(late):
        assert 8 * KEPT < found["measured"] < 14 * KEPT
        assert abs(found["measured"] / found["activations"] - 1) < 0.02
        # Parameter, gradient: there is no more. The ranks' exchange takes buffers after that.
        assert found["step_memory"] <= found["activations"] + found["memory"]


def test_inputs_that_the_user_keeps_are_there():
    engine = start(Blocks(), batch={"accumulate": 4})
    kept = []
    for _ in range(3):
        kept.clear()
        for _ in range(4):
            x = torch.ones(ROWS, WIDTH)
            loss = engine(x)
            kept.append(x)  # four inputs live until the next step
            engine.backward(loss)
            engine.step()
    found = entry(engine)
    engine.close()
    # The inputs of later micro-batches are made within the window.
    expected = (2 * LAYERS + 3) * KEPT
    assert expected < found["activations"] < expected + 2.5 * KEPT
    assert expected - KEPT < found["measured"] < expected + 1.5 * KEPT


def test_two_forwards_before_a_backward():
    engine = start(Blocks())
    for _ in range(2):
        x = torch.ones(ROWS, WIDTH)
        engine.backward(engine(x) + engine(x))
        engine.step()
    found = entry(engine)
    engine.close()
    expected = 4 * LAYERS * KEPT
    assert expected < found["activations"] < 1.25 * expected
    assert abs(found["measured"] / found["activations"] - 1) < 0.02


def test_other_engines_of_the_process_make_it_unknown():
    first, second = start(Blocks()), start(copy.deepcopy(Blocks()))
    for _ in range(3):
        for engine in (first, second):
            engine.backward(engine(torch.ones(ROWS, WIDTH)))
            engine.step()
    assert entry(first)["activations"] == entry(second)["activations"] == 0
    second.close()
    third = start(Blocks())
    for _ in range(2):
        for engine in (first, third):  # the first one does not count any more, but it trains
            engine.backward(engine(torch.ones(ROWS, WIDTH)))
            engine.step()
    assert entry(third)["activations"] == 0
    third.close()
    first.close()
    last = start(Blocks())
    assert train(last, 2)[-1]["activations"] > 0
    last.close()


def test_evaluations_and_an_error_in_between():
    engine = start(Blocks(), batch={"accumulate": 2})
    (one,) = train(engine, 1)
    assert one["activations"] == 0
    with pytest.raises(RuntimeError):
        engine(torch.ones(3, WIDTH + 1))

    def evaluate() -> None:
        with torch.no_grad():
            engine(torch.ones(ROWS, WIDTH))

    kept = []
    for _ in range(2):  # micro-batches of step two
        evaluate()
        kept.append(torch.ones(ROWS, WIDTH))
        engine.backward(engine(kept[-1]))
        evaluate()
        engine.step()
    last = entry(engine)
    engine.close()
    expected = (2 * LAYERS + 1) * KEPT  # and the second input, which is made within the window
    assert expected < last["measured"] < expected + KEPT
    assert expected < last["activations"] < expected + 2 * KEPT


@pytest.mark.parametrize("schedule", [("interleaved", 2), ("zero_bubble", 1)])
def test_several_stages_and_split_backwards_are_not_measured(schedule, pools):
    found = pools(2).run(in_a_pipeline, *schedule)
    assert [one["activations"] for one in found] == [0, 0]


def test_the_text_says_it():
    import penstock  # noqa: PLC0415

    engine = start(Blocks())
    train(engine, 2)
    ledger = engine.ledger()
    text = penstock.format_ledger(ledger)
    engine.close()
    assert f"activations in step two {ledger['measured']['activations'] / 2**20:.2f}" in text
