"""offload.keep_bytes: units that stay whole between forwards, and their edits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import test_quantized as quantized
import test_rest_in_files as rest
import torch
import torch.distributed as dist
from torch import nn

WIDE = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 160}


def llama() -> nn.Module:
    return rest.hf.build("llama", **WIDE).bfloat16().eval()


def start(folder: str, model: nn.Module, keep: int, **more: Any) -> Any:
    offload = {"keep_bytes": keep} | more.pop("offload", {})
    return rest.start(folder, model, offload=offload, **more)


def disk_read(engine: Any) -> int:
    return int(engine.ledger()["measured"]["disk_read"])


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(1, 13).view(2, 6)).logits
    return logits


TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "no prefetch": (1, {"prefetch_bytes": 0}),
    "quantized": (1, {"quantize": {"dtype": "int8"}}),
    "zero3": (2, {}),
    "on host": (2, {"offload": {"params": "host"}}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "S2": (2, {"mesh": {"sequence": 2}}),
    "P2": (2, {"mesh": {"pipeline": 2}}),
}


def keeps(folder: str, keep: int, table: dict[str, Any]) -> dict[str, Any]:
    plain = llama()
    engine = start(folder, copy.deepcopy(plain), keep, **copy.deepcopy(table))
    forward(engine)
    told: dict[str, Any] = {"same": [], "read": [], "ledger": quantized.ledger_of(engine)}
    plain.load_state_dict(engine.state_dict(rank0_only=False))
    for _ in range(4):
        before = disk_read(engine)
        ours, theirs = forward(engine), forward(plain)
        if "sequence" in table.get("mesh", {}):
            theirs = theirs.chunk(2, dim=1)[dist.get_rank()]
        told["same"].append(torch.equal(ours, theirs))
        told["read"].append(disk_read(engine) - before)
    told["text"] = torch.equal(rest.text(engine.module), rest.text(plain))
    told["kept"] = engine.explain().count(" (kept)")
    engine.close()
    told["closed"] = all(
        torch.equal(p, q)
        for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)
    )
    return told


@pytest.mark.parametrize("table", TABLES)
def test_keeps_what_a_forward_uses_first(table, pools, tmp_path):
    world, config = TABLES[table]
    without = pools(world).run(keeps, str(tmp_path), 0, config)
    some = pools(world).run(keeps, str(tmp_path), 200_000, config)
    everything = pools(world).run(keeps, str(tmp_path), 10**9, config)
    for none, part, whole in zip(without, some, everything, strict=True):
        for told in (none, part, whole):
            quantized.close_ledger(*told["ledger"])
            assert all(told["same"]) and told["text"] and told["closed"], told
        assert none["kept"] == 0 and part["kept"] >= 2 and whole["kept"] > part["kept"]
        if table == "on host":
            continue
        # The second forward reads what is not kept. The third one, too (edits are looked for in
        # the first one).
        assert 0 < part["read"][2] < none["read"][2], (part, none)
        assert whole["read"][1:] == [0, 0, 0]


def edits(folder: str, how: str) -> dict[str, Any]:
    plain = llama()
    engine = start(folder, copy.deepcopy(plain), 10**9 if how == "all" else 200_000)
    forward(engine)
    told: dict[str, Any] = {}
    name = "model.layers.0.mlp.up_proj.weight"
    params = dict(engine.module.named_parameters())
    if how in ("gathered", "all"):
        with engine.gathered([params[name]], write=True), torch.no_grad():
            params[name].mul_(2)
        plain.get_parameter(name).data.mul_(2)
    elif how == "load":
        given = {n: v * 0.5 for n, v in plain.state_dict().items()}
        engine.load_state_dict(given)
        plain.load_state_dict(given)
    elif how == "set_param_state":
        given = plain.get_parameter(name).float() * 2
        engine.set_param_state(params[name], "param", given)
        plain.get_parameter(name).data.mul_(2)
    elif how == "resident":
        with engine.inference("resident"):
            told["inside"] = torch.equal(forward(engine.module), forward(plain))
    elif how == "error":
        with pytest.raises(Exception):  # noqa: B017, PT011
            engine.module(input_ids=torch.full((1, 2), 10**6))
    elif how == "in place":
        params[name].data.mul_(2)
        try:
            told["state"] = torch.equal(
                engine.state_dict(rank0_only=False)[name], plain.get_parameter(name) * 2
            )
        except RuntimeError as error:
            told["state"] = str(error)
        try:
            told["same"] = torch.equal(forward(engine), forward(plain))
        except RuntimeError as error:
            told["said"] = str(error)
        engine.close(gather=False)
        return told
    told["same"] = torch.equal(forward(engine), forward(plain))
    told["state"] = all(
        torch.equal(v, plain.state_dict()[n].float())
        for n, v in engine.state_dict(rank0_only=False).items()
    )
    engine.close()
    return told


@pytest.mark.parametrize("how", ["gathered", "all", "load", "set_param_state", "resident", "error"])
@pytest.mark.parametrize("world", [1, 2])
def test_kept_units_have_the_new_values(how, world, pools, tmp_path):
    for told in pools(world).run(edits, str(tmp_path), how):
        assert told.pop("inside", True)
        assert told == {"same": True, "state": True}, told


def test_an_edit_in_place_is_an_error(pools, tmp_path):
    for told in pools(2).run(edits, str(tmp_path), "in place"):
        assert "up_proj" in told["said"] and "gathered" in told["said"], told
        assert "up_proj" in told["state"] and "gathered" in told["state"], told


def goes_on(folder: str) -> dict[str, Any]:
    """One rank's forward raises, and the script goes on."""
    plain = llama()
    engine = start(folder, copy.deepcopy(plain), 10**9)
    told = {"before": torch.equal(forward(engine), forward(plain)), "raised": False}
    if dist.get_rank() == 1:
        try:
            engine.module(input_ids=torch.full((1, 2), 10**6))
        except IndexError:
            told["raised"] = True
    told["after"] = torch.equal(forward(engine), forward(plain))
    engine.close()
    return told


def test_an_error_of_one_rank_leaves_kept_units(pools, tmp_path):
    first, second = pools(2).run(goes_on, str(tmp_path))
    assert first == {"before": True, "raised": False, "after": True}
    assert second == {"before": True, "raised": True, "after": True}
