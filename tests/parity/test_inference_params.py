"""requires_grad of the parameters of an engine for inference: off for the user, and as it was
during forwards without gradients, because torch's matmul depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import hugging_face as hf
from test_inference import ODD, prompts

TABLES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero3": {},
    "disk": {"offload": {"params": "disk"}},
}


def flags(model: Any) -> list[bool]:
    return [one.requires_grad for one in model.parameters()]


def watches(table: str, path: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    config = {"inference": True, "units": {"layer_bytes": 1}} | TABLES[table]
    if "offload" in config:
        config["offload"] = config["offload"] | {"path": path}
    model = hf.build("llama", **ODD)
    model.model.embed_tokens.requires_grad_(False)
    before = flags(model)
    engine = penstock.initialize(model, config)
    seen: list[list[bool]] = []
    handle = model.lm_head.register_forward_hook(lambda *_: seen.append(flags(model)))
    told: dict[str, Any] = {"set_up": not any(flags(model))}
    ids = prompts()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            logits = engine(input_ids=ids).logits
        told[f"outside {grad}"] = not any(flags(model)) and not logits.requires_grad
    told["inside"] = seen == [before, [False] * len(before)]
    try:
        with torch.no_grad():
            model(input_ids=ids.tolist())
    except (AttributeError, TypeError, ValueError):
        told["after an error"] = not any(flags(model))
    handle.remove()
    with torch.no_grad():
        model.model.norm(torch.ones(1, model.config.hidden_size))
    told["after a layer alone"] = not any(flags(model))
    engine.close()
    told["closed"] = flags(model) == before
    return told


@pytest.mark.parametrize("table", TABLES)
def test_flags(table, pools, tmp_path):
    for told in pools(2).run(watches, table, str(tmp_path)):
        assert len(told) == 7 and all(told.values()), told


def products(of: str) -> list[tuple[str, int]]:
    """Returns how often each product of matrices ran in a forward that keeps the last logits."""
    import penstock  # noqa: PLC0415

    model = hf.build("llama", **ODD).eval()
    called = model
    if of != "plain":
        called = penstock.initialize(model, {"inference": True} | TABLES[of])
    with torch.no_grad(), torch.profiler.profile() as profile:
        called(input_ids=prompts(), logits_to_keep=1)
    if of != "plain":
        called.close()
    names = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
    return sorted((one.key, one.count) for one in profile.key_averages() if one.key in names)


@pytest.mark.parametrize("table", ["ddp", "zero3"])
def test_the_same_products_as_plain_torch(table, pools):
    plain = pools(1).run(products, "plain")[0]
    assert plain
    assert pools(1).run(products, table)[0] == plain
