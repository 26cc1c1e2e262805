"""Lossy wires: what travels is what the documented code gives, whatever the strategy, and nothing
else is rounded: weights at rest, gathered values, checkpoints and edits are exact."""

from __future__ import annotations

from typing import Any

import compare
import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import Case

WIDTH, BLOCKS, BATCH = 32, 3, 6
LEVELS = {"int8": 127, "int4": 7, "fp8": 448}


class Block(nn.Module):
    """One parameter, so that its flat and the flat's blocks are known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int, ranks: int) -> list[torch.Tensor]:
    """By rank."""
    made = torch.randn(ranks * BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return list(made.chunk(ranks))


def coded(values: torch.Tensor, code: str, block: int = 128) -> torch.Tensor:
    """The values as they arrive: nearest rounding, a scale per block."""
    rows = values.float().flatten().view(-1, block)
    largest = rows.abs().amax(1, keepdim=True)
    # A number divided by a tensor would be rounded twice.
    scaled = rows * torch.full_like(largest, LEVELS[code]).div(largest)
    codes = scaled.to(torch.float8_e4m3fn).float() if code == "fp8" else scaled.round()
    return (codes * (largest / LEVELS[code])).view(values.shape)


def steps_of(values: torch.Tensor, code: str, block: int = 128) -> torch.Tensor:
    """The step of each value's block."""
    largest = values.flatten().view(-1, block).abs().amax(1, keepdim=True)
    return (largest / LEVELS[code]).expand(-1, block).reshape(values.shape)


def config(strategy: str, wire: dict[str, str] | None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "strategy": strategy,
        "optimizer": {"type": "SGD", "lr": 0.5},
        "units": {"modules": ["Block"]} if wire is not None else {},
        "comm": {"timeout_s": 60},
        "table": {"wire": wire} if wire else {},
    }
    return made | more


def engine_of(settings: dict[str, Any], model: nn.Module | None = None) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(model or Net(), settings)


# ---- parameters


def first_step(settings: dict[str, Any], ranks: int, precision: str) -> tuple[Any, Any, Any]:
    engine = engine_of(settings | {"precision": precision})
    x = batch(0, ranks)[dist.get_rank()]
    out = engine(x.to(training.DTYPES[precision])).float()
    engine.backward(out.square().mean())
    return out.detach(), engine.full_grads(), engine.state_dict()


PARAM_CASES = {
    "zero3": ("zero3", 2, {}),
    "zero3-4": ("zero3", 4, {}),
    "nodes": ("zero3", 4, {"mesh": {"node": 2}}),
    "mics": ("mics", 4, {"mesh": {"node": 2}}),
    "hpz": ("hpz", 4, {"mesh": {"node": 2}}),
    "host": ("zero3", 2, {"offload": {"params": "host", "optimizer": "host"}}),
    "late": ("zero3", 2, {"offload": {"optimizer": "host", "late_update": True}}),
    "recompute": ("zero3", 2, {"activations": {"checkpoint": "unit"}}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("wire", ["int8", "int8/32", "int4/64", "fp8"])
@pytest.mark.parametrize(("strategy", "ranks", "more"), PARAM_CASES.values(), ids=PARAM_CASES)
def test_parameters_arrive_as_coded(strategy, ranks, more, wire, precision, pools):
    code, _, block = wire.partition("/")
    dtype = training.DTYPES[precision]
    plain = Net()
    kept = {name: value.clone() for name, value in plain.state_dict().items()}
    for value in plain.parameters():
        value.data = coded(value.data.to(dtype), code, int(block or 128)).to(dtype)
    outs = [plain(x.to(dtype)).float() for x in batch(0, ranks)]
    torch.stack([out.square().mean() for out in outs]).mean().backward()
    settings = config(strategy, {"param": wire}, **more)
    found = pools(ranks).run(first_step, settings, ranks, precision)
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 3e-2, "atol": 2e-3}
    for (out, gradients, _), wanted in zip(found, outs, strict=True):
        torch.testing.assert_close(out, wanted, **close)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(gradients[name], value.grad.float(), **close)
            assert torch.equal(found[0][2][name], kept[name])


# ---- gradients


class Sum(nn.Module):
    """The gradient of the weight is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8 * WIDTH * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def gradient_of(settings: dict[str, Any], addends: torch.Tensor, accumulate: int) -> torch.Tensor:
    """addends: (accumulate, ranks, numel)"""
    engine = engine_of(settings | {"batch": {"accumulate": accumulate}}, Sum())
    for micro in range(accumulate):
        engine.backward(engine(addends[micro, dist.get_rank()]))
    found = engine.full_grads()["weight"]
    norm = float(found.double().norm())
    engine.step()
    assert engine.grad_norm == pytest.approx(norm, rel=1e-5)
    return found


GRAD_CASES = {
    "ddp": ("ddp", 2, {}),
    "ddp-4": ("ddp", 4, {}),
    "zero1": ("zero1", 2, {}),
    "zero2": ("zero2", 4, {}),
    "zero3": ("zero3", 2, {}),
    "nodes": ("zero2", 4, {"mesh": {"node": 2}}),
    "ddp-nodes": ("ddp", 4, {"mesh": {"node": 2}}),
    "mics": ("mics", 4, {"mesh": {"node": 2}}),
    "hpz": ("hpz", 4, {"mesh": {"node": 2}}),
    "partial": (
        "mics",
        4,
        {
            "mesh": {"node": 2},
            "table": {"grad": {"hold": "PS@device:fp32", "update": "RS@device:fp32"}},
        },
    ),
    "host": ("zero2", 2, {"offload": {"optimizer": "host", "gradients": "host"}}),
    "disk": ("zero3", 2, {"offload": {"optimizer": "disk", "gradients": "disk", "path": "."}}),
}


def grad_settings(case: str, wire: str, tmp_path: Any) -> tuple[dict[str, Any], int]:
    strategy, ranks, more = GRAD_CASES[case]
    more = {key: dict(value) for key, value in more.items()}
    if "path" in more.get("offload", {}):
        more["offload"]["path"] = str(tmp_path)
    table = more.pop("table", {}) | {"wire": {"grad": wire}}
    return config(strategy, None, **more, table=table), ranks


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wire", ["int8", "int4/64", "node:int8"])
@pytest.mark.parametrize("case", GRAD_CASES)
def test_whole_numbers_are_summed_exactly(case, wire, accumulate, pools, tmp_path):
    """Where each block's largest addend is the number of levels, its step is 1. A sum that travels
    on may not be whole, so all ranks have the same addends."""
    settings, ranks = grad_settings(case, wire, tmp_path)
    levels = LEVELS["int4" if "int4" in wire else "int8"]
    numel = Sum().weight.numel()
    numbers = torch.Generator().manual_seed(1)
    one = torch.randint(-levels, levels + 1, (numel,), generator=numbers).float()
    one[::32] = levels
    addends = one.expand(accumulate, ranks, numel).contiguous()
    for found in pools(ranks).run(gradient_of, settings, addends, accumulate):
        torch.testing.assert_close(found, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wire", ["int8", "int4/64"])
@pytest.mark.parametrize("case", GRAD_CASES)
def test_an_error_is_at_most_a_step_of_each_addend(case, wire, pools, tmp_path):
    """And the mean of many errors is far below."""
    settings, ranks = grad_settings(case, wire, tmp_path)
    code, _, block = wire.partition("/")
    addends = torch.randn(
        1, ranks, Sum().weight.numel(), generator=torch.Generator().manual_seed(2)
    )
    exact = addends[0].mean(0)
    steps = torch.stack([steps_of(x, code, int(block or 128)) for x in addends[0]])
    # The addends of each sum are rounded once, and so is the sum of those that travels on.
    most = steps.mean(0) + steps.amax(0) * 1.2
    found = pools(ranks).run(gradient_of, settings, addends, 1)
    for one in found:
        assert torch.equal(one, found[0])
        assert ((one - exact).abs() <= most).all()
        bias = float(((one - exact) / steps.mean(0)).mean())
        assert abs(bias) < 5 / one.numel() ** 0.5
    assert not torch.equal(found[0], exact)


def errors_of(settings: dict[str, Any], addend: torch.Tensor) -> list[torch.Tensor]:
    """Of the backwards of two steps with two backwards each, in sums of `addend`."""
    engine = engine_of(settings | {"batch": {"accumulate": 2, "reduction": "sum"}}, Sum())
    errors = []
    for _ in range(2):
        before = torch.zeros_like(addend)
        for _ in range(2):
            engine.backward(engine(addend))
            found = engine.full_grads()["weight"]
            errors.append(found - before - addend)
            before = found
            engine.step()
    return errors


def test_the_noise_differs_between_ranks_backwards_and_steps(pools):
    """With the same numbers on both ranks, the error of the mean would be 0.41 steps."""
    settings = config("zero2", None, table={"wire": {"grad": "int8"}})
    addend = torch.randn(Sum().weight.numel(), generator=torch.Generator().manual_seed(3))
    for errors in pools(2).run(errors_of, settings, addend):
        for i, one in enumerate(errors):
            in_steps = one / steps_of(addend, "int8")
            assert float(in_steps.square().mean().sqrt()) == pytest.approx(0.289, rel=0.1)
            for other in errors[:i]:
                both = torch.corrcoef(torch.stack([one, other]))
                assert abs(float(both[0, 1])) < 0.05


# ---- training


TRAININGS = [
    Case("ddp"),
    Case("zero1", accumulate=2),
    Case("zero2", "bf16", world=4),
    Case("zero2", clip=True),
    Case("zero3", accumulate=3),
    Case("zero3", "bf16", world=4, recompute="nonreentrant"),
    Case("zero3", "fp16"),
    Case("zero3", clip=True, world=3),
    Case("zero3", world=4, model="parts", tensor=2),
    Case("ddp", world=4, model="parts", tensor=2),
    Case("zero1", world=4, model="parts", tensor=2),
    Case("hpz", world=4),
    Case("mics", "bf16", world=4, accumulate=2),
    Case("hpz_host", world=4),
    *(Case(strategy, model=name) for name in zoo.EVERYWHERE for strategy in ("ddp", "zero3")),
]


@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_int8_trains_like_plain_torch(case, pools):
    """Twice the same bits, ranks with equal weights, and losses near those of exact exchanges."""
    comm = case.config()["comm"] | {"codec": "int8"}
    runs, plain = compare.lossy_runs(case, pools, {"comm": comm}, limit=0.02)
    deviation = compare.change_deviation(
        runs[0].weights, plain.weights, training.initial_weights(case.model, trained=True)
    )
    assert deviation < 0.5


# ---- everything else is exact

LIFE = {"zero3": 2, "hpz": 4, "mics": 4}


def life_settings(strategy: str) -> dict[str, Any]:
    mesh = {"node": 2} if strategy != "zero3" else {}
    return config(strategy, {"param": "int4/32", "grad": "int4/32"}, mesh=mesh)


def train_steps(engine: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        x = batch(step, dist.get_world_size())[dist.get_rank()]
        engine.backward(engine(x).square().mean())
        engine.step()


def writes_inside(settings: dict[str, Any]) -> list[bool]:
    """Whether gathered values are those at rest, also just after a forward that rounded them, and
    whether an edit of one element changes only that one."""
    engine = engine_of(settings)
    train_steps(engine, 0, 2)
    engine.eval()
    engine(batch(9, 1)[0])
    engine.train()
    state = engine.state_dict()  # on rank 0
    params = dict(engine.module.named_parameters())
    with engine.gathered():
        read = all(torch.equal(params[name], value) for name, value in state.items())
        with engine.gathered(params.values()):
            read &= all(torch.equal(params[name], value) for name, value in state.items())
    name = "blocks.1.weight"
    with engine.gathered(write=True), torch.no_grad():
        params[name][3, 5] += 0.25
    if state:
        state[name][3, 5] += 0.25
    after = engine.state_dict()
    written = all(torch.equal(after[key], state[key]) for key in state)
    train_steps(engine, 2, 1)
    engine.close()
    return [read, written]


@pytest.mark.parametrize(("strategy", "ranks"), LIFE.items(), ids=LIFE)
def test_gathered_values_and_edits_are_exact(strategy, ranks, pools):
    for found in pools(ranks).run(writes_inside, life_settings(strategy)):
        assert found == [True, True]


def text_of_error(settings: dict[str, Any], how: str) -> str:
    engine = engine_of(settings)
    block = engine.module.blocks[1]

    def inside(module: nn.Module, _: Any) -> None:
        if how == "gathered":
            with engine.gathered(write=True):
                pass
        elif how == "reads":
            with engine.gathered([module.weight]):
                assert torch.equal(module.weight, coded(module.weight, "int4", 32))
        elif how == "memory":
            module.weight.data = module.weight.data.clone()
        else:
            module.weight.data[0, 0] += 1.0

    block.register_forward_pre_hook(inside)
    try:
        train_steps(engine, 0, 2)
    except Exception as error:  # noqa: BLE001 - its text is the result
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("gathered", 'unit "blocks.1" has values that a lossy wire has rounded'),
        ("reads", ""),
        ("edits", '"blocks.1.weight" was changed in place'),
        ("memory", '"blocks.1.weight" was changed in place'),
    ],
    ids=["gathered", "reads", "edits", "memory"],
)
def test_edits_of_rounded_values(how, text, pools):
    for found in pools(2).run(text_of_error, life_settings("zero3"), how):
        assert text in found
        assert bool(text) == bool(found)


def saved(settings: dict[str, Any], path: str) -> Any:
    engine = engine_of(settings)
    train_steps(engine, 0, 3)
    engine.save(path)
    state = engine.state_dict()
    train_steps(engine, 3, 2)
    return state, engine.state_dict()


def loaded(settings: dict[str, Any], path: str) -> Any:
    engine = engine_of(settings)
    engine.load(path)
    state = engine.state_dict()
    train_steps(engine, 3, 2)
    return state, engine.state_dict()


def test_a_checkpoint_is_exact_and_loads_under_any_wire(pools, tmp_path):
    lossy, plain = life_settings("zero3"), config("zero2", {})
    state, later = pools(2).run(saved, lossy, str(tmp_path))[0]
    same, also = pools(2).run(loaded, lossy, str(tmp_path))[0]
    other, _ = pools(2).run(loaded, plain, str(tmp_path))[0]
    more, _ = pools(4).run(loaded, lossy, str(tmp_path))[0]
    for name, value in state.items():
        for found in (same, other, more):
            assert torch.equal(found[name], value), name
        assert torch.equal(also[name], later[name]), name


# ---- exact steps

EXACT = {"timeout_s": 60, "exact_first": 2, "exact_every": 4}
EXACT_STEPS = {1, 2, 4, 8}
EXACT_CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 2, {"precision": "bf16"}),
    "zero2": ("zero2", 2, {"batch": {"accumulate": 2}}),
    "zero3": ("zero3", 2, {}),
    "zero3-4": ("zero3", 4, {"precision": "bf16", "batch": {"accumulate": 2}}),
    "hpz": ("hpz", 4, {"mesh": {"node": 2}}),
    "late": ("zero3", 2, {"offload": {"optimizer": "host", "late_update": True}}),
    "host": ("zero3", 2, {"offload": {"params": "host", "optimizer": "host"}}),
    "disk": ("zero3", 2, {"offload": {"params": "disk", "optimizer": "disk"}}),
    "twice": ("zero3", 2, {"precision": "bf16"}),
    "window": ("zero3", 2, {"batch": {"accumulate": 2}, "activations": {"checkpoint": "unit"}}),
}


def exact_settings(case: str, path: Any) -> tuple[dict[str, Any], int]:
    strategy, ranks, more = EXACT_CASES[case]
    wire = {"grad": "int4/32"}
    if strategy not in ("ddp", "zero1", "zero2"):
        wire["param"] = "node:int4/32" if strategy == "hpz" else "int4/32"
    if "disk" in more.get("offload", {}).values():
        more = more | {"offload": more["offload"] | {"path": str(path)}}
    adam = {"type": "AdamW", "lr": 1e-2}
    return config(strategy, wire, optimizer=adam, comm=EXACT) | more, ranks


def one_step(engine: Any, step: int, twice: bool) -> dict[str, torch.Tensor]:
    """`twice`: the second block also computes at an earlier place of the model, off the plan."""
    micros = engine.config.batch.accumulate
    dtype = next(engine.module.parameters()).dtype
    for micro in range(micros):
        x = batch(10 * step + micro, dist.get_world_size())[dist.get_rank()]
        out = engine(x.to(dtype))
        if twice and step > 1:
            out = out + engine.module.blocks[1](x.to(dtype))
        engine.backward(out.square().float().mean() / micros)
        engine.step()
    state: dict[str, torch.Tensor] = engine.state_dict(rank0_only=False)
    return state


def with_exact_steps(
    settings: dict[str, Any], path: str, first: int, count: int, twice: bool = False
) -> Any:
    engine = engine_of(settings)
    if first > 1:
        engine.load(f"{path}/{first - 1}")
    states = []
    for step in range(first, first + count):
        states.append(one_step(engine, step, twice))
        if first == 1:
            engine.save(f"{path}/{step}")
    engine.close()
    return states


@pytest.mark.parametrize("case", EXACT_CASES)
def test_exact_steps_are_those_of_a_table_without_wires(case, pools, tmp_path):
    """Bitwise, and no other step is; a run that goes on from a checkpoint has the same steps."""
    settings, ranks = exact_settings(case, tmp_path)
    plain = settings | {"table": {}, "comm": {"timeout_s": 60, "reduce_dtype": "gradient"}}
    pool, path = pools(ranks), str(tmp_path)
    twice = case == "twice"
    states = pool.run(with_exact_steps, settings, path, 1, 8, twice)[0]
    first = pool.run(with_exact_steps, plain, f"{path}/plain", 1, 1, twice)[0][0]
    assert all(torch.equal(first[name], states[0][name]) for name in first)
    for step in range(2, 9):
        same = pool.run(with_exact_steps, settings, path, step, 1, twice)[0][0]
        exact = pool.run(with_exact_steps, plain, path, step, 1, twice)[0][0]
        made = states[step - 1]
        assert all(torch.equal(same[name], made[name]) for name in made), step
        alike = all(torch.equal(exact[name], made[name]) for name in made)
        assert alike == (step in EXACT_STEPS), step


def explained_and_measured(settings: dict[str, Any]) -> tuple[str, Any]:
    """`explain()` in an exact step, and the ledger after further steps."""
    engine = engine_of(settings)
    text = engine.explain()
    train_steps(engine, 0, 4)
    return text, engine.ledger()


def test_the_ledger_has_the_peaks_of_exact_steps(pools):
    """These steps take the most memory, 47,104 bytes; the others 31,936."""
    wire = {"param": "int8", "grad": "int4"}
    settings = config("zero3", wire, comm=EXACT | {"exact_every": 0})
    text, ledger = pools(2).run(explained_and_measured, settings)[0]
    assert "all_gather(data:int8/128)" in text and "have plain wires in this plan" in text
    predicted, measured = ledger["predicted"]["zero3"], ledger["measured"]
    assert measured["total"] == pytest.approx(predicted["total"], rel=0.05)
    assert measured["exchanges"] == predicted["exchanges"]


def refusal(settings: dict[str, Any], model: nn.Module | None = None) -> str:
    try:
        engine_of(settings, model)
    except Exception as error:  # noqa: BLE001 - its text is the result
        return str(error)
    return ""


def test_a_parameter_that_is_not_finite_is_refused(pools):
    for found in pools(2).run(refusal_of_mask):
        assert 'parameter "mask" has a value that is not finite' in found


def refusal_of_mask() -> str:
    model = Net()
    model.mask = nn.Parameter(torch.full((4, 4), float("-inf")), requires_grad=False)
    return refusal(config("zero3", {"param": "int8"}), model)


REFUSED = {
    "biased": ("zero2", {"grad": "int8/nearest"}, '"int8/128/nearest": wire: nearest rounding'),
    "float8": ("zero2", {"grad": "fp8"}, '"fp8/128": wire: nearest rounding'),
    "unequal": ("zero3", {"param": "int8/stochastic"}, "same parameters: write nearest"),
    "idle": ("zero2", {"param": "int8"}, "no parameter travels over the axis local while"),
    "mics": ("mics", {"param": "node:int8"}, "no parameter travels over the axis node while"),
    "unknown": ("zero3", {"param": "int3"}, '"table.wire.param" is "int3"'),
    "optim": ("zero3", {"optim": "int8"}, 'unknown key "table.wire.optim"'),
}


def test_exact_steps_without_effect_are_refused():
    import penstock  # noqa: PLC0415

    def told(comm: dict[str, Any], table: dict[str, Any] | None = None) -> str:
        with pytest.raises(penstock.ConfigError) as error:
            engine_of({"comm": comm, "table": table or {}}, Net())
        return str(error.value)

    useless = '"comm.exact_first" is 3, which has no effect without comm.codec'
    assert useless in told({"exact_first": 3})
    assert useless in told({"exact_first": 3}, {"wire": {"grad": "plain"}})
    assert '"comm.exact_every" is 1, so all steps' in told({"codec": "int8", "exact_every": 1})
    assert '"comm.exact_every" is 1, which has no effect' in told({"exact_every": 1})
    assert '"comm.exact_first" is -1' in told({"codec": "int8", "exact_first": -1})


@pytest.mark.parametrize(("strategy", "wire", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(strategy, wire, text, pools):
    mesh = {"node": 2} if strategy == "mics" else {}
    for found in pools(4 if mesh else 2).run(refusal, config(strategy, wire, mesh=mesh)):
        assert text in found


# ---- bytes


def bytes_and_plan(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    engine = engine_of(settings)
    train_steps(engine, 0, 3)
    return engine.ledger(), engine.explain()


def test_the_ledger_knows_the_encoded_pieces(pools):
    settings = config("zero3", {"param": "int8", "grad": "int4"})
    (ledger, text), _ = pools(2).run(bytes_and_plan, settings)
    assert "all_gather(data:int8/128)" in text
    assert "reduce_scatter(data:int4/128/stochastic)" in text
    predicted, measured = ledger["predicted"]["zero3"], ledger["measured"]
    assert measured["total"] == pytest.approx(predicted["total"], rel=0.05)
    assert measured["exchanges"] == predicted["exchanges"]
