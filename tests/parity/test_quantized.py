"""Frozen parameters that rest as int8 or int4 ("quantize"): a forward computes with exactly the
values that state_dict() shows, and these differ from the given ones by at most half a step."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import test_rest_in_files as rest
import torch
from parity import hugging_face as hf
from torch import nn

WIDE = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4}
LEVELS = {"int8": 127, "int4": 7}


def is_quantized(name: str) -> bool:
    return ".layers." in name and "norm" not in name


def plain_llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return hf.build("llama", **WIDE).to(dtype).eval()


def start(folder: str, model: nn.Module, dtype: str, **table: Any) -> Any:
    import penstock  # noqa: PLC0415

    quantize = {"dtype": dtype} | table.pop("quantize", {})
    table.setdefault("offload", {})
    made = rest.config(folder, inference=True, quantize=quantize, **table)
    if made["offload"].get("params") == "none":
        made["offload"] = {}
    return penstock.initialize(model, made)


def errors(state: dict[str, torch.Tensor], given: dict[str, torch.Tensor], dtype: str) -> list[str]:
    """Returns the parameters whose values are not what their dtype allows."""
    found = []
    for name, values in given.items():
        off = (state[name].float() - values.float()).abs().max().item()
        step = values.float().abs().max().item() / LEVELS[dtype]
        low = 0.02 * step if is_quantized(name) else 0.0
        high = 0.51 * step if is_quantized(name) else 0.0
        if not low <= off <= high:
            found.append(f"{name} {off} {step}")
    return found


TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "alone on host": (1, {"offload": {"params": "host"}}),
    "alone on the device": (1, {"offload": {"params": "none"}}),
    "ddp": (2, {"strategy": "ddp", "offload": {"params": "none"}}),
    "checksums": (1, {"offload": {"checksums": True}}),
    "zero3": (2, {}),
    "zero3 of 4": (4, {}),
    "zero3 on host": (2, {"offload": {"params": "host"}}),
    "zero3 on the device": (2, {"offload": {"params": "none"}}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "mics": (4, {"strategy": "mics", "mesh": {"node": 2}}),
    "no prefetch": (2, {"prefetch_bytes": 0}),
    "kept": (1, {"offload": {"keep_bytes": 50000}}),
    "kept of 2": (2, {"offload": {"keep_bytes": 50000}}),
    "S2": (2, {"mesh": {"sequence": 2}}),
    "P2": (2, {"mesh": {"pipeline": 2}}),
    "tiles": (2, {"tiling": {"max_bytes": 1024}}),
    "fp32": (2, {"precision": "fp32"}),
    "lossy wire": (2, {"comm": {"codec": "int8", "timeout_s": 20.0}}),
}


def runs(folder: str, dtype: str, table: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    table = copy.deepcopy(table)
    single = torch.float32 if table.get("precision") == "fp32" else torch.bfloat16
    plain = plain_llama(single).to(device)
    engine = start(folder, copy.deepcopy(plain), dtype, **table)
    made = rest.text(engine.module)
    state = engine.state_dict(rank0_only=False)
    told: dict[str, Any] = {"wrong": errors(state, plain.cpu().state_dict(), dtype)}
    plain.load_state_dict(state)
    plain.to(device)
    told["same"] = torch.equal(made, rest.text(plain))
    with engine.inference("resident"):
        told["resident"] = torch.equal(rest.text(engine.module), rest.text(plain))
    ids = torch.arange(1, 13, device=device).view(2, 6)
    with torch.no_grad():
        far = (engine(input_ids=ids).logits - plain(input_ids=ids).logits).float()
    told["far"] = float(far.abs().max())
    told["weights"] = all(
        torch.equal(values.cpu(), state[name]) for name, values in engine.weights(torch.bfloat16)
    ) or single == torch.float32
    told["explained"] = engine.explain()
    ledger = engine.ledger()
    told["ledger"] = (ledger["predicted"], ledger["measured"])
    engine.close()
    told["closed"] = all(
        torch.equal(p.cpu(), state[n]) for n, p in engine.module.state_dict().items()
    )
    return told


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("table", TABLES)
def test_computes_with_what_rests(table, dtype, pools, tmp_path):
    world, config = TABLES[table]
    for told in pools(world).run(runs, str(tmp_path), dtype, config):
        assert told["wrong"] == [] and told["closed"] and told["weights"], told
        if table == "lossy wire":  # rounds a second time
            assert told["far"] < 0.1, told
        else:
            assert told["same"] and told["resident"], told
            assert told["far"] < (1e-5 if table == "fp32" else 1e-6), told
        assert f"as {'int8/128' if dtype == 'int8' else 'int4/64'}" in told["explained"]
