"""Frozen parameters that rest as int8 or int4 ("quantize"): a forward computes with exactly the
values that state_dict() shows, and these differ from the given ones by at most half a step."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import test_rest_in_files as rest
import torch
import torch.distributed as dist
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
    return penstock.initialize(
        model, rest.config(folder, inference=True, quantize=quantize, **table)
    )


def errors(state: dict[str, torch.Tensor], given: dict[str, torch.Tensor], dtype: str) -> list[str]:
    """Returns the parameters whose values are not what their dtype allows.

    Half a step is lost at rest, and half a unit of bf16's last place when a value is decoded.
    Neighbouring parameters may share a scale.
    """
    largest = max(v.float().abs().max().item() for n, v in given.items() if is_quantized(n))
    limit = largest * (0.501 / LEVELS[dtype] + 2**-9)
    found = []
    for name, values in given.items():
        off = (state[name].float() - values.float()).abs().max().item()
        if not (0.0 < off <= limit if is_quantized(name) else off == 0.0):
            found.append(f"{name} {off} {limit}")
    return found


def ledger_of(engine: Any) -> tuple[dict[str, int], dict[str, int]]:
    ledger = engine.ledger()
    return ledger["predicted"][ledger["strategy"]], ledger["measured"]


def close_ledger(predicted: dict[str, int], measured: dict[str, int]) -> None:
    """The bytes in memory are as predicted, within 10 %."""
    off = abs(measured["total"] - predicted["total"])
    assert off <= 0.1 * predicted["total"], (predicted, measured)


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
    "tiles": (
        2,
        {"tiling": {"max_bytes": 1024}, "quantize": {"params": ["*.layers.*proj.weight"]}},
    ),
    "fp32": (2, {"precision": "fp32"}),
    "lossy wire": (2, {"comm": {"codec": "int8", "timeout_s": 20.0}}),
}


def runs(folder: str, dtype: str, table: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    table = copy.deepcopy(table)
    single = torch.float32 if table.get("precision") == "fp32" else torch.bfloat16
    plain = plain_llama(single).to(device)
    engine = start(folder, copy.deepcopy(plain), dtype, **table)
    made = rest.text(engine.module)
    told: dict[str, Any] = {"ledger": ledger_of(engine)}
    state = engine.state_dict(rank0_only=False)
    told["wrong"] = errors(state, plain.cpu().state_dict(), dtype)
    plain.load_state_dict(state)
    plain.to(device)
    told["same"] = torch.equal(made, rest.text(plain))
    with engine.inference("resident"):
        told["resident"] = torch.equal(rest.text(engine.module), rest.text(plain))
    ids = torch.arange(1, 13, device=device).view(2, 6)
    with torch.no_grad():
        ours, theirs = engine(input_ids=ids).logits, plain(input_ids=ids).logits
    if "sequence" in table.get("mesh", {}):
        theirs = theirs.chunk(2, dim=1)[dist.get_rank()]
    told["far"] = float((ours - theirs).abs().max())
    told["weights"] = (
        all(
            torch.equal(values.cpu(), state[name])
            for name, values in engine.weights(torch.bfloat16)
        )
        or single == torch.float32
    )
    told["explained"] = engine.explain()
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
        close_ledger(*told["ledger"])


# ---- edits, loads and saves


def exact_again(engine: Any, plain: nn.Module) -> bool:
    """Whether a forward computes with the values of state_dict()."""
    plain.load_state_dict(engine.state_dict(rank0_only=False))
    return torch.equal(rest.text(engine.module), rest.text(plain))


def edits(folder: str, dtype: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    plain = plain_llama()
    engine = start(folder, copy.deepcopy(plain), dtype)
    before = engine.state_dict(rank0_only=False)
    name = "model.layers.1.mlp.up_proj.weight"
    param = dict(engine.module.named_parameters())[name]
    with engine.gathered([param], write=True), torch.no_grad():
        param[3].mul_(0.5)
    after = engine.state_dict(rank0_only=False)
    others = [n for n in before if n != name and not torch.equal(before[n], after[n])]
    step = before[name].float().abs().max().item() / LEVELS[dtype]
    wanted = before[name].clone()
    wanted[3] *= 0.5
    told: dict[str, Any] = {
        "others": others,
        "off": float((after[name] - wanted).abs().max()) <= 0.8 * step,
        "rows": not torch.equal(after[name][3], before[name][3]),
    }
    plain.load_state_dict(after)
    told["same"] = torch.equal(rest.text(engine.module), rest.text(plain))
    given = {n: v * 0.5 for n, v in plain_llama().state_dict().items()}
    engine.load_state_dict(given)
    told["wrong"] = errors(engine.state_dict(rank0_only=False), given, dtype)
    try:
        engine.save(folder)
        told["saved"] = "no error"
    except penstock.RuntimeFault as error:
        told["saved"] = str(error)
    engine.close()
    return told


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_edits_are_rounded(dtype, pools, tmp_path):
    for told in pools(2).run(edits, str(tmp_path), dtype):
        assert re.search(r"rests quantized.*save\(path, frozen=False\)", told.pop("saved"))
        assert told == {"others": [], "off": True, "rows": True, "same": True, "wrong": []}


def loads(folder: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    torch.manual_seed(5)
    plain = plain_llama()
    trained = penstock.initialize(copy.deepcopy(plain), rest.config(folder, strategy="zero3"))
    path = trained.save(folder, "weights")
    trained.close()
    other = plain_llama()
    for param in other.parameters():
        param.data.zero_()
    engine = start(folder, other, "int8")
    engine.load(folder, "weights")
    state = engine.state_dict(rank0_only=False)
    told = {"path": bool(path), "wrong": errors(state, plain.state_dict(), "int8")}
    told["same"] = exact_again(engine, plain)
    engine.close()
    return told


def test_a_checkpoint_is_rounded(pools, tmp_path):
    for told in pools(2).run(loads, str(tmp_path)):
        assert told == {"path": True, "wrong": [], "same": True}


def from_files(folder: str) -> dict[str, Any]:
    plain = rest.files(folder)
    engine = start(folder, rest.from_files(folder), "int8")
    state = engine.state_dict(rank0_only=False)
    told = {"wrong": errors(state, plain.state_dict(), "int8"), "units": rest.in_files(engine)}
    told["same"] = exact_again(engine, plain)
    engine.close()
    return told


def test_what_is_not_quantized_stays_in_the_files(pools, tmp_path):
    for told in pools(2).run(from_files, str(tmp_path)):
        assert told["wrong"] == [] and told["same"] and told["units"] >= 6, told


def edits_of_whole_units(folder: str, keep: int) -> dict[str, Any]:
    """Edits units whose working copy stays: the copy gets the rounded values, too."""
    plain = plain_llama()
    offload = {"params": "host", "keep_bytes": keep}
    engine = start(folder, copy.deepcopy(plain), "int8", offload=offload)
    model = engine.module
    param = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    told: dict[str, Any] = {"first": exact_again(engine, plain)}
    with engine.gathered(write=True), torch.no_grad():
        param.mul_(1.7)
    told["gathered"] = exact_again(engine, plain)
    engine.load_state_dict({n: v * 0.3 for n, v in plain_llama().state_dict().items()})
    told["load_state_dict"] = exact_again(engine, plain)
    engine.set_param_state(param, "param", torch.full(param.shape, 0.123))
    told["set_param_state"] = exact_again(engine, plain)
    told["param_state"] = torch.equal(
        engine.param_state(param, "param").bfloat16(),
        engine.state_dict(rank0_only=False)["model.layers.1.mlp.up_proj.weight"].bfloat16(),
    )
    with engine.inference("resident"):
        engine.load_state_dict({n: v * 0.6 for n, v in plain_llama().state_dict().items()})
        told["inside"] = exact_again(engine, plain)
    told["after"] = exact_again(engine, plain)
    engine.close()
    return told


@pytest.mark.parametrize("keep", [0, 10**9])
@pytest.mark.parametrize("world", [1, 2])
def test_edits_reach_copies_that_stay(keep, world, pools, tmp_path):
    for told in pools(world).run(edits_of_whole_units, str(tmp_path), keep):
        assert all(told.values()), told


def not_finite(folder: str) -> list[str]:
    engine = start(folder, plain_llama(), "int8")
    param = dict(engine.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    said = []
    bad = torch.zeros(param.shape)
    bad[1, 2] = float("nan")
    try:
        engine.set_param_state(param, "param", bad)
    except ValueError as error:
        said.append(str(error))
    try:
        with engine.gathered(write=True), torch.no_grad():
            param[1, 2] = float("inf")
    except RuntimeError as error:
        said.append(str(error))
    engine.close()
    return said


def test_values_that_are_not_finite_are_refused(pools, tmp_path):
    for said in pools(2).run(not_finite, str(tmp_path)):
        assert len(said) == 2 and all("up_proj" in one and "finite" in one for one in said), said


def alone(folder: str) -> bool:
    engine = start(folder, plain_llama(), "int8", strategy="ddp", offload={"params": "none"})
    for _ in range(3 if dist.get_rank() == 0 else 0):
        rest.text(engine.module)
    engine.close()
    return True


def test_a_rank_with_all_parameters_generates_alone(pools, tmp_path):
    assert all(pools(2).run(alone, str(tmp_path)))


# ---- a frozen base beside parameters that train


def adapts(folder: str, table: dict[str, Any], dtype: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    base = hf.build("llama", **rest.ODD).bfloat16()
    torch.manual_seed(4)
    model = rest.Adapted(copy.deepcopy(base))
    plain = copy.deepcopy(model)
    made = rest.config(folder, **copy.deepcopy(table))
    engine = penstock.initialize(model, made | {"quantize": {"dtype": dtype}})
    state = engine.state_dict(rank0_only=False)
    plain.load_state_dict(state)
    exact = penstock.initialize(plain, made)
    losses: list[list[float]] = [[], []]
    for step in range(4):
        ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))
        for one, found in zip((engine, exact), losses, strict=True):
            loss = one(ids)
            one.backward(loss)
            one.step()
            found.append(loss.item())
    ends = [one.state_dict(rank0_only=False) for one in (engine, exact)]
    told = {
        "quantized": engine.explain().count(" as int"),
        "losses": losses[0] == losses[1],
        "ends": all(torch.equal(v, ends[1][n]) for n, v in ends[0].items()),
        "moved": not torch.equal(ends[0]["up.weight"], state["up.weight"].float()),
    }
    engine.save(folder, "adapters", frozen=False)
    engine.load(folder, "adapters", frozen=False)
    again = engine.state_dict(rank0_only=False)
    told["again"] = all(torch.equal(v, again[n]) for n, v in ends[0].items())
    engine.close()
    exact.close()
    return told


BASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "zero3": (2, {}),
    "zero3 on host": (2, {"offload": {"params": "host"}}),
    "zero3 with all on disk": (2, {"offload": {"optimizer": "disk", "params": "disk"}}),
    "zero3 on the device": (2, {"offload": {"params": "none"}}),
    "zero2": (2, {"strategy": "zero2", "offload": {"params": "none"}}),
    "zero1 with state on host": (
        2,
        {"strategy": "zero1", "offload": {"params": "none", "optimizer": "host"}},
    ),
    "ddp": (2, {"strategy": "ddp", "offload": {"params": "none"}}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "recomputed": (2, {"activations": {"checkpoint": "unit"}}),
}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("table", BASES)
def test_adapters_train_over_a_quantized_base(table, dtype, pools, tmp_path):
    world, config = BASES[table]
    for told in pools(world).run(adapts, str(tmp_path), config, dtype):
        assert told.pop("quantized") >= 4
        assert told == {"losses": True, "ends": True, "moved": True, "again": True}


# ---- what is refused


def refused(folder: str, config: dict[str, Any], train: bool, bad: bool) -> str:
    import penstock  # noqa: PLC0415

    plain = plain_llama()
    if bad:
        plain.model.layers[0].mlp.up_proj.weight.data[2, 3] = float("inf")
    made = {"inference": not train, "comm": {"timeout_s": 20.0}} | config
    try:
        penstock.initialize(plain, made)
    except penstock.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("config", "train", "bad", "said"),
    [
        ({"quantize": {"dtype": "int8"}}, True, False, "no parameter is quantized.*inference"),
        (
            {"quantize": {"dtype": "int8", "params": ["x*"]}},
            False, False, r"no parameter is quantized.*patterns are x\*",
        ),
        (
            {"table": {"param": {"rest": "SS@device:int8/128"}}},
            False, False, r'table.param.rest is "SS@device:int8/128".*quantize.dtype',
        ),
        (
            {"quantize": {"dtype": "int8", "params": ["*up_proj*", "*upproj*"]}},
            False, False, r'params has "\*upproj\*", which no frozen parameter has',
        ),
        (
            {"table": {"param": {"hold": "SS@host:int4/64"}}},
            False, False, r'table.param.hold is "SS@host:int4/64"',
        ),
        (
            {"offload": {"params": "host", "keep_bytes": 10}},
            False, False, r"keep_bytes\" is 10, but the smallest unit has \d+ bytes",
        ),
        (
            {"offload": {"params": "host", "keep_bytes": "1MiB"}, "comm": {"codec": "int8"}},
            False, False, "keep_bytes.*lossy wire",
        ),
        ({"quantize": {"dtype": "int4"}}, False, True, "up_proj.weight.*not finite.*quantize"),
    ],
)  # fmt: skip
def test_refused(config, train, bad, said, pools):
    for answer in pools(2).run(refused, "", config, train, bad):
        assert re.search(said, answer), answer
