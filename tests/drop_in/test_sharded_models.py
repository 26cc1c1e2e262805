"""Models built and edited with DeepSpeed's calls for ZeRO-3: zero.Init, GatheredParameters, leaf
modules, and models that DeepSpeed needs special care for."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipe_models import deepspeed
from raised import raised
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.timeout(480)

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def config(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 0,
    } | changes


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2, WIDTH, generator=generator)
    return x, torch.randint(0, 3, (2,), generator=generator)


def values(model: nn.Module) -> torch.Tensor:
    with deepspeed().zero.GatheredParameters(model):
        return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def logits(out: Any) -> torch.Tensor:
    return getattr(out, "logits", out)


def gap(model: nn.Module, stage: int, plain: nn.Module) -> float:
    """Trains the model on all ranks, and `plain` in this process with the samples of all ranks.
    Returns the largest difference of a weight."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    engine = deepspeed().initialize(model=model, config=config(stage))[0]
    for step in range(4):
        x, y = batch(step, rank)
        engine.backward(functional.cross_entropy(logits(engine(x)), y))
        engine.step()
        for other in range(world):
            x, y = batch(step, other)
            (functional.cross_entropy(logits(plain(x)), y) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    return (values(model) - values(plain)).abs().max().item()


# ---- zero.Init


def dtypes(arguments: dict[str, Any]) -> list[str]:
    """Dtypes of parameters and buffers built in the context, and the default dtype after it."""
    with deepspeed().zero.Init(**arguments):
        norm = nn.BatchNorm1d(2)
        norm.own = nn.Parameter(torch.zeros(2, dtype=torch.float32))
    found = [str(one.dtype) for one in (norm.weight, norm.own, norm.running_mean, torch.ones(1))]
    with deepspeed().zero.GatheredParameters(norm, modifier_rank=0):
        norm.own.add_(1.0) if not norm.own.requires_grad else norm.own.data.add_(1.0)
    with deepspeed().zero.GatheredParameters(norm):
        assert torch.equal(norm.own, torch.ones(2, dtype=norm.own.dtype))
    return found


F32, BF16 = "torch.float32", "torch.bfloat16"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, [F32, F32, F32, F32]),
        ({"config_dict_or_path": config(3, bf16={"enabled": True})}, [F32, F32, F32, F32]),
        ({"dtype": torch.bfloat16}, [BF16, BF16, BF16, F32]),
        ({"dtype": torch.bfloat16, "tensor_overrides": ["device"]}, [F32, F32, F32, F32]),
        ({"dtype": torch.bfloat16, "enabled": False}, [F32, F32, F32, F32]),
    ],
)
def test_dtypes_of_init(drop_in_pools, arguments, wanted):
    assert drop_in_pools(2).run(dtypes, arguments)[1] == wanted


def refused_inits() -> list[str]:
    init, own = deepspeed().zero.Init, torch.distributed.new_group([0])
    other = torch.distributed.new_group([1])
    alone = own if torch.distributed.get_rank() == 0 else other
    whole = torch.distributed.group.WORLD
    init(data_parallel_group=whole), init(remote_device="cpu"), init(tensor_overrides=[])
    return [
        raised(functools.partial(init, **arguments))
        for arguments in (
            {"remote_device": "nvme"},
            {"remote_device": "disk"},
            {"dtype": torch.float64},
            {"zero_quantized_weights": True},
            {"zero_quantized_nontrainable_weights": True},
            {"param_swapper": object()},
            {"data_parallel_group": alone},
            {"sequence_data_parallel_group": alone},
            {"data_parallel_group": whole, "sequence_data_parallel_group": whole},
            {"shape": 3},
        )
    ]


def test_init_refuses(drop_in_pools):
    texts = (
        "remote_device is 'nvme', which is not supported: pass a config whose offload_param",
        "remote_device is 'disk'",
        "dtype is torch.float64",
        "zero_quantized_weights is True",
        "zero_quantized_weights is True",
        "param_swapper is",
        "data_parallel_group is 'a group of 1 of 2 ranks'",
        "data_parallel_group is 'a group of 1 of 2 ranks'",
        "data_parallel_group is given, too",
        "unexpected keyword argument 'shape'",
    )
    for text, found in zip(texts, drop_in_pools(2).run(refused_inits)[1], strict=True):
        assert text in found


def fewer_ranks_than_started() -> str:
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = "8"
    try:
        return raised(deepspeed().zero.Init)
    finally:
        os.environ.pop("WORLD_SIZE") if before is None else os.environ.update(WORLD_SIZE=before)


def test_init_of_one_rank_of_several(drop_in_pools):
    assert "WORLD_SIZE=8 ranks, but" in drop_in_pools(1).run(fewer_ranks_than_started)[0]


class Half(nn.Module):
    """Changes its parameters while it is built, and builds more of itself in a context."""

    sharded = True

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.scale.data = (self.scale.data + depth).data
        self.off = self.scale.new_zeros(1)
        if depth:
            with deepspeed().zero.Init(enabled=self.sharded):
                self.inner = type(self)(depth - 1)
            self.scale.data = self.scale.data + self.inner.scale.data
        self.late = nn.Linear(3, 2)


def built(how: str, config: Any) -> dict[str, Any]:
    ds = deepspeed()
    torch.manual_seed(5)
    if how == "module":  # a part is sharded, the rest is not
        model = Half(0)
        with ds.zero.Init(config=config):
            model.more = nn.Linear(2, 2)
        ds.zero.Init(module=model, config_dict_or_path=config)
    else:
        with ds.zero.Init(config_dict_or_path=config):
            model = Half()
    torch.manual_seed(5)
    plain = type("Plain", (Half,), {"sharded": False})(0 if how == "module" else 1)
    if how == "module":
        plain.more = nn.Linear(2, 2)
    status = {str(one.ds_status) for one in model.parameters()}
    same = bool(torch.equal(values(model), values(plain)))
    return {"status": sorted(status), "same": same, "ids": [p.ds_id for p in model.parameters()]}


@pytest.mark.parametrize("how", ["nested", "module"])
@pytest.mark.parametrize("as_path", [False, True])
def test_built_in_parts(drop_in_pools, how, as_path, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(3)))
    for found in drop_in_pools(2).run(built, how, str(path) if as_path else config(3)):
        assert found["status"] == ["ZeroParamStatus.NOT_AVAILABLE"]
        assert found["same"] and len(set(found["ids"])) == len(found["ids"])


# ---- GatheredParameters


def sharded(with_engine: bool) -> tuple[Any, Any]:
    ds = deepspeed()
    torch.manual_seed(0)
    with ds.zero.Init():
        model = Net()
    engine = ds.initialize(model=model, config=config(3))[0] if with_engine else None
    return model, engine


def gathered(with_engine: bool) -> dict[str, Any]:
    ds, rank = deepspeed(), torch.distributed.get_rank()
    model, engine = sharded(with_engine)
    weight, bias = model.head.weight, model.head.bias
    whole = ds.zero.GatheredParameters
    found: dict[str, Any] = {"shapes": []}
    for params in (
        weight,
        [weight, None, bias],
        (one for one in model.parameters()),
        {"a": weight, "b": [bias]},
        model,
        [weight, weight],
    ):
        with whole(params, fwd_module=model):
            found["shapes"].append(weight.detach().sum().item() != 0)
            with whole([weight]), whole([bias], modifier_rank=None):
                found["nested"] = bool(weight.detach().abs().sum() > 0)
            found["nested"] &= bool(weight.detach().abs().sum() > 0)
    with whole([weight], enabled=False):
        found["off"] = str(weight.ds_status)
    with whole(model.head.parameters(), modifier_rank=1), torch.no_grad():
        weight.fill_(float(rank))
        found["status"] = str(weight.ds_status)
    found["written"] = values(model.head)[: weight.numel()].unique().tolist()

    def inside() -> None:
        with whole(weight), whole(weight, modifier_rank=0):
            pass

    def changed() -> None:
        with whole(weight), torch.no_grad():
            if rank == 0:
                weight.add_(1.0)

    found["said"] = [raised(one) for one in (inside, changed, lambda: whole("weight"))]
    found["kept"] = values(model.head)[: weight.numel()].unique().tolist()
    with whole(weight), torch.no_grad():  # every rank writes the values that are there
        weight.copy_(weight.clone())
    found["same"] = values(model.head)[: weight.numel()].unique().tolist()
    if engine is not None:
        engine.destroy()
    return found


@pytest.mark.parametrize("with_engine", [False, True])
def test_gathered(drop_in_pools, with_engine):
    for found in drop_in_pools(2).run(gathered, with_engine):
        assert found["shapes"] == [True] * 6 and found["nested"]
        assert found["off"].endswith("NOT_AVAILABLE") and found["status"].endswith(".AVAILABLE")
        assert found["written"] == found["kept"] == found["same"] == [1.0]
        inside, changed, text = found["said"]
        assert "this block cannot have a modifier_rank" in inside
        assert changed.startswith("RuntimeFault") and "change" in changed
        assert "a str is not a parameter" in text


# ---- models


class Result:
    """An output that is a plain object."""

    def __init__(self, out: torch.Tensor) -> None:
        self.logits = out


class Objects(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x))


class Delegating(nn.Module):
    """Looks up missing attributes in the module that it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x)


class Inner(nn.Linear):
    """A block that returns its bias in an object."""

    def forward(self, x: torch.Tensor) -> Any:
        made = Result(super().forward(x))
        made.bias = self.bias
        return made


class Dangling(Net):
    """A part's output is an object with a parameter in it, which is used outside of the part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(super().forward(x))
        return made.logits + made.bias


class Alternating(Net):
    """Another block in each forward."""

    turn = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.turn += 1
        return self.head(x + torch.tanh(self.blocks[self.turn % 2](x)))


class External(Net):
    """A block's weight is used in another module, too."""

    def forward(self, x: torch.Tensor) -> Any:
        deepspeed().zero.register_external_parameter(self, self.blocks[0].weight)
        return super().forward(functional.linear(x, self.blocks[0].weight))


def delegating() -> nn.Module:
    model = Net()
    model.blocks[1], model.head = Delegating(model.blocks[1]), Delegating(model.head)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "objects": Objects,
    "dangling": Dangling,
    "delegating": delegating,
    "alternating": Alternating,
    "external": External,
}


def model_gap(name: str, stage: int) -> float:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    if name == "alternating":
        deepspeed().utils.set_z3_leaf_modules(model, [Alternating])
        plain.turn = 0
    if name == "alternating":  # `plain` runs once for each rank
        return alternating_gap(model, plain, stage)
    return gap(model, stage, plain)


def alternating_gap(model: Any, plain: Any, stage: int) -> float:
    forward = type(plain).forward

    class Once(type(plain)):  # type: ignore[misc]
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.turn = self.calls // torch.distributed.get_world_size()
            self.calls += 1
            return forward(self, x)

    plain.__class__ = Once
    return gap(model, stage, plain)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_model(drop_in_pools, name, stage):
    assert max(drop_in_pools(2).run(model_gap, name, stage)) < 1e-5


def attached(stage: int) -> list[str]:
    """Modules that the model gets after initialize()."""
    model = Net()
    engine = deepspeed().initialize(model=model, config=config(stage))[0]
    x, _ = batch(0, 0)
    model.frozen = nn.Linear(3, 3).requires_grad_(False)
    said = [raised(lambda: engine(x))]
    model.late = nn.Linear(3, 3)
    said.append(raised(lambda: engine(x)))
    del model.late
    said.append(raised(lambda: engine(x)))
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_attached_after_initialize(drop_in_pools, stage):
    frozen, late, again = drop_in_pools(2).run(attached, stage)[0]
    assert frozen == again == ""
    assert 'parameter "late.weight" was added after initialize()' in late


# ---- leaf modules


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x)


class Derived(Wrapper):
    pass


def leaves() -> list[Any]:
    u = deepspeed().utils

    def fresh() -> Any:
        made = Net()
        made.blocks[0], made.head = Wrapper(made.blocks[0]), Derived(made.head)
        return made

    def names(model: nn.Module, found: Any) -> Any:
        of = {id(module): name for name, module in model.named_modules()}
        if isinstance(found, tuple):
            return [names(model, found[0]), found[1]]
        return [of[id(one)] for one in found]

    found: list[Any] = []
    for call, *arguments in (
        (u.set_z3_leaf_modules, [Wrapper]),
        (u.set_z3_leaf_modules, ["Wrapper"]),
        (u.set_z3_leaf_modules, [f"{__name__}.Derived", nn.ModuleList]),
        (u.set_z3_leaf_modules_by_name, ["blocks.0", "head"]),
        (u.set_z3_leaf_modules_by_suffix, ["wrapped", "0.wrapped", "head"]),
        (u.set_z3_leaf_modules_by_name, ["head", "no"], True, False),
        (u.set_z3_leaf_modules_by_suffix, ["wrapped", "no"], True, False),
    ):
        model = fresh()
        returned = names(model, call(model, *arguments))
        marked = sorted(names(model, u.get_z3_leaf_modules(model)))
        found.append([returned, marked])
    model = fresh()
    u.set_z3_leaf_modules(model, [Wrapper])
    u.unset_z3_leaf_modules(model, [Derived])
    u.set_z3_leaf_modules_by_name(model, ["blocks"], False)
    found.append(names(model, u.get_z3_leaf_modules(model)))
    found.append(raised(lambda: u.set_z3_leaf_modules(model, [nn.Conv1d])))
    found.append(raised(lambda: u.set_z3_leaf_modules_by_name(model, ["head", "no"])))
    found.append(raised(lambda: u.set_z3_leaf_modules_by_suffix(model, ["no"])))
    section = {"names": "head", "classes": [nn.ModuleList.__qualname__], "name_suffixes": ["no"]}
    zero = {"stage": 3, "leaf_module": section}
    engine = deepspeed().initialize(model=model, config=config(3, zero_optimization=zero))[0]
    found.append(names(model, u.get_z3_leaf_modules(model)))
    found.append([u.z3_leaf_parameter(one) for one in model.parameters()])
    found.append([u.z3_leaf_module(model.head), u.z3_leaf_module(model)])  # also a module's name
    lists = engine.optimizer.leaf_parameters
    found.append({names(model, [one])[0]: len(lists[one]) for one in lists})
    engine.destroy()
    return found


def test_leaf_modules(drop_in_pools):
    *marks, section, params, are_leaves, lists = drop_in_pools(2).run(leaves)[0]
    by_class, by_text, by_path, name, end, some_names, some_ends, left, *texts = marks
    assert by_class == [["blocks.0", "head"]] * 2
    assert by_text == [["blocks.0"]] * 2
    assert by_path == [["blocks", "head"]] * 2
    assert name == [[["blocks.0", "head"], []], ["blocks.0", "head"]]
    assert end[0] == [["blocks.0.wrapped", "head.wrapped", "head"], []]
    assert some_names == [[["head"], ["no"]], ["head"]]
    assert some_ends == [[["blocks.0.wrapped", "head.wrapped"], ["no"]],
                         ["blocks.0.wrapped", "head.wrapped"]]  # fmt: skip
    assert left == ["blocks.0"]
    assert [text.split(":")[0] for text in texts] == ["ValueError"] * 3
    assert section == ["blocks", "blocks.0", "head"]
    assert params == [True] * 6 and are_leaves == [True, False]
    assert sum(lists.values()) == 6 and set(lists) <= set(section)


# ---- states in host memory


def offloaded(stage: int) -> dict[str, Any]:
    """offload_states() and reload_states() between steps, beside an engine without them."""
    ds, weights, said = deepspeed(), [], []
    for moves in (False, True):
        torch.manual_seed(0)
        model = Net()
        engine = ds.initialize(model=model, config=config(stage))[0]
        for step in range(3):
            x, y = batch(step, torch.distributed.get_rank())
            engine.backward(functional.cross_entropy(engine(x), y))
            engine.step()
            if moves:
                engine.offload_states(include=["optim_states", "hp_params"], pin_memory=True)
                if stage > 0:
                    engine.optimizer.offload_states(device="cpu", non_blocking=True)
                said = [
                    raised(functools.partial(engine.offload_states, **options))
                    for options in ({"device": "nvme"}, {"include": ["typo"]}, {"device": "none"})
                ]
                engine.reload_states(non_blocking=True)
        engine.destroy()
        weights.append(values(model))
    return {"same": bool(torch.equal(*weights)), "said": said}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_offload_states_on_a_cpu(drop_in_pools, stage):
    for found in drop_in_pools(2).run(offloaded, stage):
        assert found["same"]
        nvme, unknown, none = found["said"]
        assert "NVMe is not supported, as in DeepSpeed" in nvme
        assert "'typo' is not a valid OffloadStateTypeEnum" in unknown and none == ""


def first_masters(stage: int) -> bool:
    """Whether the first fp32 masters are the fp32 values that the model had."""
    torch.manual_seed(0)
    model = Net()
    before = [one.detach().clone() for one in model.parameters()]
    settings = config(stage, bf16={"enabled": True})
    engine = deepspeed().initialize(model=model, config=settings)[0]
    masters = [deepspeed().utils.safe_get_full_fp32_param(one) for one in model.parameters()]
    engine.destroy()
    return all(map(torch.equal, masters, before))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_first_masters_are_not_rounded(drop_in_pools, stage):
    assert drop_in_pools(2).run(first_masters, stage) == [True, True]


def sections() -> list[Any]:
    zero = deepspeed().runtime.zero
    make = zero.config.DeepSpeedZeroConfig
    return [
        make(cpu_offload=True).offload_optimizer.device.value,
        make(cpu_offload_param=True).offload_param.device.value,
        make(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save,
        [make(stage=stage).overlap_comm for stage in (1, 3)],
        make(offload_optimizer={"pipeline_read": True}).offload_optimizer.pipeline,
        make(leaf_module={"names": "a"}).leaf_module.names,
    ]


def test_sections_of_the_config(drop_in_pools):
    assert drop_in_pools(1).run(sections)[0] == ["cpu", "cpu", True, [False, True], True, ["a"]]
