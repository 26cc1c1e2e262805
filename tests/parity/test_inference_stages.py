"""Forwards without gradients and text from pipelines: all ranks get the outputs of plain torch."""

from __future__ import annotations

from typing import Any

import hugging_face as hf
import pytest
import torch
from test_inference import ODD, prompts, text

pytestmark = pytest.mark.timeout(480)


def pads(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Prompts of different lengths."""
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    made: torch.Tensor = model.generate(
        ids * mask, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    return made


def samples(model: Any, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    made: torch.Tensor = model.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0)
    return made


def searches(model: Any, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(ids, max_new_tokens=6, num_beams=3, pad_token_id=0)
    return made


def without_cache(model: Any, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(ids, max_new_tokens=4, use_cache=False, pad_token_id=0)
    return made


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = model(input_ids=ids, labels=ids, use_cache=False)
        states = model(ids, use_cache=False, return_dict=False)
    return torch.cat([made.logits, made.loss.expand(*made.logits.shape[:2], 1), states[0]], -1)


WAYS = [text, pads, samples, searches, without_cache, logits]


def relays(family: str, config: dict[str, Any]) -> list[str]:
    import penstock  # noqa: PLC0415

    model = hf.build(family, num_hidden_layers=4, **ODD)
    more = {"batch": {"accumulate": 2}, "units": {"layer_bytes": 1}}
    engine = penstock.initialize(model, more | config)
    plain = hf.build(family, num_hidden_layers=4, **ODD).eval()
    ids = prompts(engine.data_rank)
    told = []
    model.eval()
    several = engine.config.parallel.virtual_stages > 1
    for way in [without_cache, logits] if several else WAYS:
        if not torch.equal(way(model, ids), way(plain, ids)):
            told.append(way.__name__)
    with torch.no_grad():
        if not torch.equal(engine(ids).logits, plain(ids).logits):
            told.append("engine")
    said = []
    used = torch.no_grad()(lambda: model(ids).past_key_values.get_seq_length())
    for call in (lambda: model(ids), used):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    if several:
        try:
            text(model, ids)
        except ValueError as error:
            assert "they cannot fill a cache. Pass use_cache=False" in str(error)
    model.train()
    engine.train_batch(iter([hf.batch(family, part, engine.data_rank) for part in range(2)]))
    engine.close()
    assert "Without gradients (torch.no_grad()), call eval_batch(), or the whole" in said[0]
    assert "contain a DynamicCache" in said[1]
    return told


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_pipelines_relay(family, pools):
    for told in pools(2).run(relays, family, {"mesh": {"pipeline": 2}}):
        assert told == []


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_stages_of_other_schedules_relay(schedule, pools):
    config: dict[str, Any] = {"mesh": {"pipeline": 2}, "parallel": {"schedule": schedule}}
    if schedule == "interleaved":
        config["parallel"]["virtual_stages"] = 2
    for told in pools(2).run(relays, "llama", config):
        assert told == []


def draws() -> list[torch.Tensor]:
    """Dropout in forwards without gradients."""
    import penstock  # noqa: PLC0415

    model = hf.build("gpt2", num_hidden_layers=4, resid_pdrop=0.5, **ODD)
    engine = penstock.initialize(model, {"mesh": {"pipeline": 2}, "batch": {"accumulate": 2}})
    model.train()
    with torch.no_grad():
        made = [engine(prompts(), use_cache=False).logits for _ in range(2)]
    engine.close()
    return made


def test_forwards_draw_other_numbers(pools):
    (first, second), theirs = pools(2).run(draws)
    assert not torch.equal(first, second)
    assert torch.equal(first, theirs[0]) and torch.equal(second, theirs[1])
