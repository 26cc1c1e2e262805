"""Floating buffers in bf16 and fp16.

The running statistics and vectors of torch's own modules train as in a model that torch converted;
other buffers keep their dtype unless a rule names them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

WIDTH, BATCH, STEPS, LR = 6, 8, 3, 0.1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {"bf16": 2**-7, "fp16": 2**-9, "fp32": 1e-5}


class Block(nn.Module):
    def __init__(self, norm, layer=None):
        super().__init__()
        self.layer = layer or nn.Linear(WIDTH, WIDTH)
        self.norm = norm

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


class Images(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind(3), nn.Conv2d(3, 3, 3, padding=1)) for _ in range(2))
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        x = x[:, None, :, None].expand(-1, 3, -1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((2, 3)))


class Wide(nn.BatchNorm1d):
    """Computes in fp32, so that the statistics may stay in fp32."""

    def forward(self, x):
        weights = self.running_mean, self.running_var, self.weight.float(), self.bias.float()
        return nn.functional.batch_norm(x.float(), *weights, self.training).to(x.dtype)


class Activated(nn.BatchNorm1d):
    """Has a forward of its own, which needs statistics in the dtype of the weight."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class Scaled(nn.Module):
    """An own module that multiplies by a table, and turns by another as rotary embeddings do."""

    def __init__(self, cast=False):
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("inv_freq", 1e-2 ** torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("temperature", torch.tensor(0.7))  # a number: no mixture
        self.cast = cast

    def forward(self, x):
        table = self.table.to(x.dtype) if self.cast else self.table
        return x * table / self.temperature * self.inv_freq.cos().to(x.dtype)


def rows(norm, wrapped=None):
    wrapped = wrapped or (lambda layer: layer)
    blocks = [Block(norm(), wrapped(nn.Linear(WIDTH, WIDTH))) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2))


MODELS = {
    "batch_norm_1d": lambda: rows(lambda: nn.BatchNorm1d(WIDTH)),
    "batch_norm_2d": lambda: Images(nn.BatchNorm2d),
    "no_affine": lambda: rows(lambda: nn.BatchNorm1d(WIDTH, affine=False)),
    "no_statistics": lambda: rows(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "cumulative": lambda: rows(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance_norm": lambda: Images(
        lambda width: nn.InstanceNorm2d(width, affine=True, track_running_stats=True)
    ),
    "root": lambda: nn.Sequential(Block(nn.Identity()), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)),
    "spectral_norm": lambda: rows(nn.Identity, nn.utils.spectral_norm),
    "parametrized": lambda: rows(nn.Identity, nn.utils.parametrizations.spectral_norm),
}


def built(name):
    torch.manual_seed(4)
    return MODELS[name]()


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def converted(model, dtype, world):
    """Trains as one does in plain torch: each rank's copy converted, the weights kept in fp32.
    Returns the losses and the copies, by rank."""
    copies = [copy.deepcopy(model).to(dtype) for _ in range(world)]
    masters = [param.detach().clone() for param in model.parameters()]
    losses = [[] for _ in range(world)]
    for step in range(STEPS):
        sums = [torch.zeros_like(master) for master in masters]
        for rank, one in enumerate(copies):
            one.zero_grad()
            loss = one(batch_of(rank, step).to(dtype)).float().square().mean()
            loss.backward()
            losses[rank].append(loss.item())
            for total, param in zip(sums, one.parameters(), strict=True):
                total += param.grad.float() / world
        for master, total in zip(masters, sums, strict=True):
            master -= LR * total
        for one in copies:
            for param, master in zip(one.parameters(), masters, strict=True):
                param.data.copy_(master)
    return losses, copies


def started(model, precision, **config):
    import penstock  # noqa: PLC0415

    return penstock.initialize(
        model,
        {"strategy": "zero3", "precision": precision, "units": {"modules": ["Block"]}}
        | {"loss_scale": {"initial": 1024.0} if precision == "fp16" else {}}
        | {"optimizer": {"type": "SGD", "lr": LR}, "comm": {"timeout_s": 30}}
        | config,
    )


def trained(engine, dtype):
    losses = []
    for step in range(STEPS):
        loss = engine(batch_of(dist.get_rank(), step).to(dtype)).float().square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
    return losses


def near(ours, theirs, precision):
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING[precision], atol=ROUNDING[precision])


def like_converted(name, precision, folder):
    dtype, rank = DTYPES[precision], dist.get_rank()
    theirs, copies = converted(built(name), dtype, dist.get_world_size())
    model = built(name)
    before = dict(model.named_buffers())
    engine = started(model, precision)
    near(trained(engine, dtype), theirs[rank], precision)
    plain = dict(copies[rank].named_buffers())
    for key, buffer in model.named_buffers():
        assert buffer is before[key], "the engine replaced a buffer"
        assert buffer.dtype == plain[key].dtype or name == "no_affine", key
        near(buffer.float(), plain[key].float(), precision)
    engine.save(folder)
    model.eval(), copies[rank].eval()
    x = batch_of(rank, 9).to(dtype)
    with torch.no_grad():
        near(engine(x).float(), copies[rank](x).float(), precision)
    state = engine.state_dict()
    engine.close()
    if rank == 0:
        assert {key: state[key].dtype for key in plain} == {
            key: value.dtype for key, value in model.named_buffers()
        }

    again = built(name)
    engine = started(again, precision)
    engine.load(folder)
    for key, buffer in again.named_buffers():
        assert buffer.equal(dict(model.named_buffers())[key])
    engine.close()


CASES = [(name, "bf16") for name in MODELS] + [("batch_norm_1d", "fp16"), ("parametrized", "fp16")]
CASES += [("batch_norm_2d", "fp32")]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_trains_like_the_converted_model(name, precision, pools, tmp_path):
    pools(2).run(like_converted, name, precision, str(tmp_path))


# by case: how the norm was built, `precision`, `dtypes`, the dtype of the statistics
FOLLOWS = {
    "weights_in_bf16": ({"weight": "bf16"}, None, {}, "bf16"),
    "statistics_in_bf16": ({"running_mean": "bf16", "running_var": "bf16"}, None, {}, "fp32"),
    "all_in_bf16_for_fp32": ({"": "bf16"}, "fp32", {}, "fp32"),
    "all_in_bf16": ({"": "bf16"}, None, {}, "bf16"),
    "all_in_bf16_for_bf16": ({"": "bf16"}, "bf16", {}, "bf16"),
    "rule_for_the_norm": ({}, "bf16", {"*.norm.*": "fp32"}, "fp32"),
    "rule_for_the_weight": ({}, "bf16", {"*.norm.weight": "fp32", "*.norm.bias": "fp32"}, "fp32"),
    "double_statistics": ({"running_mean": "fp64", "running_var": "fp64"}, "bf16", {}, "bf16"),
}


def follows(built_in, precision, rules, expected):
    model = built("batch_norm_1d")
    for block in model[:2]:
        for key, kind in built_in.items():
            dtype = {**DTYPES, "fp64": torch.float64}[kind]
            for name in [key] if key else ["weight", "bias", "running_mean", "running_var"]:
                one = getattr(block.norm, name)
                one.data = one.data.to(dtype)
            if key == "weight":
                block.norm.bias.data = block.norm.bias.data.to(dtype)
    engine = started(model, precision, dtypes=rules)
    for block in model[:2]:
        norm = block.norm
        assert norm.running_mean.dtype == norm.running_var.dtype == DTYPES[expected]
        assert norm.num_batches_tracked.dtype == torch.int64
    dtype = model[0].layer.weight.dtype
    if dtype == torch.float32 and expected == "bf16":  # torch takes no fp32 input there
        engine.close()
        return
    trained(engine, dtype)
    engine.close()
    assert model[0].norm.running_mean.dtype == DTYPES[expected]
    assert model[0].norm.weight.dtype == DTYPES[expected]


@pytest.mark.parametrize("case", FOLLOWS)
def test_statistics_have_the_dtype_of_their_weight(case, pools):
    pools(2).run(follows, *FOLLOWS[case])


def tables(rules, cast, wrong):
    import penstock  # noqa: PLC0415

    torch.manual_seed(4)
    model = rows(lambda: Scaled(cast))
    if wrong is None:
        reference = copy.deepcopy(model)
        theirs, _ = converted(reference, torch.bfloat16, dist.get_world_size())
    engine = started(model, "bf16", dtypes=rules)
    for block in model[:2]:
        assert block.norm.inv_freq.dtype == block.norm.temperature.dtype == torch.float32
        assert block.norm.table.dtype == (torch.bfloat16 if rules else torch.float32)
    if wrong is None:
        near(trained(engine, torch.bfloat16), theirs[dist.get_rank()], "bf16")
    else:
        with pytest.raises(penstock.RuntimeFault, match=wrong):
            trained(engine, torch.bfloat16)
    engine.close()


WRONG = r'same dtype(.|\n)*"dtypes": {"\*\.norm\.table": "bf16", "\*\.norm\.inv_freq": "bf16"}'


@pytest.mark.parametrize(
    ("rules", "cast", "wrong"),
    [({}, True, None), ({"*.table": "bf16"}, False, None), ({}, False, WRONG)],
    ids=["cast_in_the_forward", "rule", "refused"],
)
def test_own_tables_keep_their_dtype_unless_a_rule_names_them(rules, cast, wrong, pools):
    pools(2).run(tables, rules, cast, wrong)


def own_norms():
    import penstock  # noqa: PLC0415

    model = rows(lambda: Wide(WIDTH))
    engine = started(model, "bf16")
    trained(engine, torch.bfloat16)
    assert model[0].norm.running_mean.dtype == torch.float32
    engine.close()

    model = rows(lambda: Activated(WIDTH))
    engine = started(model, "bf16")
    rules = {"*.norm.running_mean": "bf16", "*.norm.running_var": "bf16"}
    with pytest.raises(penstock.RuntimeFault, match="scalar type") as caught:
        trained(engine, torch.bfloat16)
    assert json.dumps(rules) in str(caught.value)
    engine.close()
    engine = started(model, "bf16", dtypes=rules)
    trained(engine, torch.bfloat16)
    engine.close()


def test_a_norm_with_a_forward_of_its_own_keeps_its_dtypes(pools):
    pools(2).run(own_norms)


def inputs_in_fp32():
    engine = started(rows(nn.Identity), "bf16")
    with pytest.raises(RuntimeError, match="dtype") as caught:
        trained(engine, torch.float32)
    assert "buffer" not in str(caught.value)
    engine.close()


def test_no_buffer_is_blamed_for_an_input(pools):
    pools(2).run(inputs_in_fp32)


def sync_batch_norm():
    engine = started(rows(lambda: nn.SyncBatchNorm(WIDTH)), "bf16")
    x = batch_of(0, 0).bfloat16()
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        engine(x)
    engine.eval()
    with torch.no_grad():
        engine(x)
    engine.close()


def test_sync_batch_norm_does_what_torch_does_on_the_cpu(pools):
    pools(2).run(sync_batch_norm)


def tied_statistics():
    model = built("batch_norm_1d")
    model[1].norm.running_mean = model[0].norm.running_mean
    engine = started(model, "bf16")
    assert model[1].norm.running_mean is model[0].norm.running_mean
    assert model[0].norm.running_mean.dtype == torch.bfloat16
    trained(engine, torch.bfloat16)
    engine.close()


def test_shared_buffers_stay_shared(pools):
    pools(2).run(tied_statistics)
