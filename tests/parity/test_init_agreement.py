"""Models under `penstock.init()` whose parts are copied, replaced or dropped.

The garbage collectors of the ranks run at different times. Every story gives the values of the same
build without init()."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS, BATCH = 8, 6, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Encoder(nn.Module):
    """torch's encoder, which makes its layers by copy.deepcopy of one."""

    def __init__(self, layer=None):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        layer = layer or nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.encoder(self.embed(tokens))


class With(nn.Module):
    """A model and a copy of it (or of a part) that both train."""

    def __init__(self, model, twin):
        super().__init__()
        self.model, self.twin = model, twin

    def forward(self, tokens):
        return torch.cat([self.model(tokens), self.twin(tokens)], -1)


class Saved(nn.Module):
    """A layer and its trainable copy, as peft's modules_to_save wraps them."""

    def __init__(self, original):
        super().__init__()
        self.original = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        original.requires_grad_(False)

    def forward(self, x):
        return self.modules_to_save["default"](x)


def on_rank(rank):
    return dist.is_initialized() and dist.get_rank() == rank


def in_cycle(module):
    module.__dict__["itself"] = [module]
    return module


def resized(embedding, rows):
    """As transformers does it in resize_token_embeddings()."""
    new = nn.Embedding(rows, WIDTH)
    new.weight.data[: embedding.num_embeddings] = embedding.weight.data[: embedding.num_embeddings]
    return new


# ---- stories: context() opens penstock.init(), or nothing in the plain build


def layer_replaced(context):
    with context():
        model = Net()
        model.embed = resized(model.embed, ROWS + 3)
        model.head.weight = model.embed.weight
    return model


def data_replaced(context):
    with context():
        model = Net()
        new = resized(model.embed, ROWS + 3)
        model.embed.weight.data = new.weight.data
        model.embed.num_embeddings = ROWS + 3
    return model


def layer_replaced_later(context):
    with context():
        model = Net()
    with context():
        model.blocks[0] = nn.Linear(WIDTH, WIDTH)
        model.embed = resized(model.embed, ROWS + 3)
        model.head.weight = model.embed.weight
    return model


def cycle_on_rank_1(context):
    with context():
        model = Net()
        if on_rank(1):
            in_cycle(model.embed)
        model.embed = resized(model.embed, ROWS)
        model.head.weight = model.embed.weight
    with context():
        return Net()


def model_dropped(context):
    with context():
        model = Net()
    if on_rank(0):
        in_cycle(model)
    del model
    with context():
        return Net()


def model_kept_on_rank_0(context, kept=[]):  # noqa: B006 - kept until the process ends
    with context():
        model = Net()
    if on_rank(0):
        kept.append(model)
    del model
    with context():
        return Net()


def build_failed_on_rank_1(context):
    with contextlib.suppress(ZeroDivisionError):
        with context():
            model = Net()
            if on_rank(1):
                raise ZeroDivisionError
    with context():
        model = Net()
    return model


def build_failed(context):
    with contextlib.suppress(ZeroDivisionError):
        with context():
            Net()
            raise ZeroDivisionError
    with context():
        return Net()


def copied_inside(context):
    with context():
        model = Net()
        twin = copy.deepcopy(model)
        model.blocks[0].weight.data.mul_(2.0)
        twin.blocks[1].weight.data.zero_()
    return With(model, twin)


def copied_after(context):
    with context():
        model = Net()
    return With(model, copy.deepcopy(model))


def copy_of_a_copy(context):
    with context():
        model = Net()
    twin = copy.deepcopy(copy.deepcopy(model))
    gc.collect()
    return With(model, twin)


def modules_to_save(context):
    with context():
        model = Net()
    model.blocks[1] = Saved(model.blocks[1])
    return model


def average(context):
    with context():
        model = Net()
    mean = torch.optim.swa_utils.AveragedModel(model)
    with context():
        model.blocks[0].weight.data.add_(1.0)
        mean.update_parameters(model)
        model.blocks[0].weight.data.add_(1.0)
        mean.update_parameters(model)
    return With(model, mean.module)


def encoder_inside(context):
    with context():
        return Encoder()


def encoder_after(context):
    with context():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    torch.manual_seed(5)
    model = Encoder(layer)
    model.encoder.layers[0].linear1 = copy.deepcopy(model.encoder.layers[1].linear1)
    return model


def plain_attributes(context):
    with context():
        model = Net()
        model.rows = model.blocks[0].weight.data[2:4]
        model.all = model.blocks[0].weight.detach()
    twin = copy.deepcopy(model)
    with context():
        twin.rows.fill_(3.0)
        twin.all[0] += 1.0  # the same storage, another than its parameter's
        twin.blocks[0].weight.data.copy_(twin.all)
    return twin


STORIES = [
    layer_replaced,
    data_replaced,
    layer_replaced_later,
    cycle_on_rank_1,
    model_dropped,
    model_kept_on_rank_0,
    build_failed_on_rank_1,
    build_failed,
    copied_inside,
    copied_after,
    copy_of_a_copy,
    modules_to_save,
    average,
    encoder_inside,
    encoder_after,
    plain_attributes,
]
ON_DISK = [layer_replaced_later, cycle_on_rank_1, copied_after, modules_to_save, encoder_inside]


def hollow(model):
    """Whether no rank has a whole parameter."""
    from penstock.front import sharded_init  # noqa: PLC0415

    return all(sharded_init.waiting().holds(param) for param in model.parameters())


def told(story, path):
    """Trains the story's model under init() and without. Rank 0 collects no garbage meanwhile."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    plain = story(contextlib.nullcontext)
    torch.manual_seed(3)
    gc.collect()
    if on_rank(0):
        gc.disable()
    try:
        model = story(functools.partial(penstock.init, timeout_s=20.0, path=path))
        assert hollow(model) or story is encoder_after  # it builds its embedding without init()
        config = {"strategy": "zero3", "optimizer": {"type": "SGD", "lr": 0.1}}
        engine = penstock.initialize(model, config | {"comm": {"timeout_s": 20.0}})
        before = engine.state_dict()
        tokens = torch.randint(
            ROWS, (BATCH, 3), generator=torch.Generator().manual_seed(dist.get_rank())
        )
        engine.backward(engine(tokens).square().mean())
        assert engine.step()
        engine.close()
        with penstock.init(timeout_s=20.0):  # the ranks still agree
            nn.Linear(2, 2)
    finally:
        gc.enable()
    if on_rank(0):
        theirs = plain.state_dict()
        assert before.keys() == theirs.keys()
        for name, value in before.items():
            assert value.equal(theirs[name]), name


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_values_are_those_of_a_plain_build(story, pools):
    pools(2).run(told, story, "")


@pytest.mark.parametrize("story", ON_DISK, ids=lambda story: story.__name__)
def test_the_same_on_disk(story, pools, tmp_path):
    pools(2).run(told, story, str(tmp_path))
    assert not list(tmp_path.iterdir())


def ties_and_flags():
    import penstock  # noqa: PLC0415

    with penstock.init():
        model = Net()
        model.blocks[0].bias.requires_grad_(False)
        model.blocks[1].bfloat16()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight is not model.embed.weight
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert type(ours) is nn.Parameter
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.requires_grad == theirs.requires_grad
    penstock.initialize(With(model, twin)).close()


def test_a_copy_keeps_ties_dtypes_and_flags(pools):
    pools(2).run(ties_and_flags)


def reads_outside():
    import penstock  # noqa: PLC0415

    with penstock.init():
        model = Net()
    twin = copy.deepcopy(model)
    for read in (
        lambda: twin.embed.weight.sum(),
        lambda: pickle.dumps(twin),
        lambda: twin(torch.arange(2)),
    ):
        with pytest.raises(RuntimeError, match=r"inside `with penstock\.init\(\):`"):
            read()


def test_a_copy_has_no_values_outside(pools):
    pools(2).run(reads_outside)


def models_one_by_one():
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    first, second = Net(), Net()
    plain = [first.state_dict(), second.state_dict()]
    torch.manual_seed(3)
    with penstock.init():
        models = [Net(), Net()]
    for model, theirs in zip(models, plain, strict=True):
        twin = copy.deepcopy(model)
        found = []
        for one in (model, twin):
            engine = penstock.initialize(one, {"strategy": "zero2"})
            found.append(engine.state_dict())
            engine.close()
        copy.deepcopy(model)  # whole again, so a plain copy
        if dist.get_rank() == 0:
            for state in found:
                assert all(value.equal(theirs[name]) for name, value in state.items())


def test_models_and_copies_get_engines_one_by_one(pools):
    pools(2).run(models_one_by_one)


def with_deepspeed():
    import penstock.deepspeed  # noqa: PLC0415

    penstock.deepspeed.install()
    import deepspeed  # noqa: PLC0415

    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    with deepspeed.zero.Init():
        model = Net()
    model.blocks[0] = Saved(model.blocks[0])
    own = model.blocks[0].modules_to_save["default"]
    with deepspeed.zero.GatheredParameters(own.parameters(), modifier_rank=1):
        assert own.weight.equal(plain.blocks[0].weight)
        if dist.get_rank() == 1:
            own.weight.data.fill_(2.0)
    with deepspeed.zero.GatheredParameters([own.weight, model.blocks[0].original.weight]):
        assert own.weight.eq(2.0).all()
        assert model.blocks[0].original.weight.equal(plain.blocks[0].weight)


def test_copies_under_zero_init():
    pool = ranks.Pool(2)  # of its own, because the package stays installed
    try:
        pool.run(with_deepspeed)
    finally:
        pool.close()
