"""What scripts do to a model inside `penstock.init()`: the values are those of a plain build and no
rank has a whole parameter, or an error names the reason."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

WIDTH, ROWS = 8, 6
FUTURE = torch.__future__


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.down(torch.tanh(self.up(self.embed(tokens))))))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()


def new():
    return torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH)


def on_meta():
    with torch.device("meta"):
        return Net()


# ---- what is done inside the context; a function may return another model


def to_bfloat16(m):
    m.bfloat16()


def to_half_when_tied(m):
    m.tie_weights()
    m.half()
    assert m.head.weight is m.embed.weight


def to_a_dtype_and_back(m):
    m.to(torch.bfloat16).type(torch.float32)


def to_half_in_part(m):
    m.up.half()
    m.norm.to(torch.bfloat16)


def to_half_in_a_list(m):
    m.rnn = nn.LSTM(WIDTH, WIDTH)
    m.more = nn.ParameterList([torch.ones(3), torch.zeros(4)])
    m.half()


def to_half_as_new_parameters(m):
    FUTURE.set_overwrite_module_params_on_conversion(True)
    try:
        m.half()
    finally:
        FUTURE.set_overwrite_module_params_on_conversion(False)


def to_half_by_swaps(m):
    FUTURE.set_swap_module_params_on_conversion(True)
    try:
        m.half()
    finally:
        FUTURE.set_swap_module_params_on_conversion(False)


def from_meta_by_to_empty(m):
    made = on_meta().to_empty(device="cpu")
    made.load_state_dict(m.state_dict())
    return made


def from_meta_by_assign(m):
    made = on_meta()
    made.load_state_dict(
        {name: value.half() for name, value in m.state_dict().items()}, assign=True
    )
    return made


def loaded(m):
    m.load_state_dict({name: torch.full_like(value, 0.5) for name, value in m.state_dict().items()})


def initialised_by_apply(m):
    def again(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    m.apply(again)


def initialised_one_by_one(m):
    nn.init.eye_(m.up.weight)
    nn.init.sparse_(m.down.weight, 0.5)
    nn.init.orthogonal_(m.head.weight)
    nn.init.trunc_normal_(m.embed.weight)
    nn.init.constant_(m.up.bias, 3.0)


def replaced(m):
    del m.up
    m.up = nn.Linear(WIDTH, WIDTH)
    weight = m.down.weight
    del m.down.weight
    m.down.weight = nn.Parameter(weight.data.t().contiguous())


def data_of_another_tensor(m):
    m.up.weight.data = new()
    m.down.weight.data = m.down.weight.data.bfloat16().float() * 2
    m.up.bias.data = torch.tensor(3.0).expand(WIDTH)
    m.embed.weight.data = torch.cat([m.embed.weight.data, torch.ones(2, WIDTH)])


def data_transposed(m):
    m.up.weight.data = m.up.weight.data.t()
    m.down.weight.data = new().t()


def shape_changed_in_place(m):
    view = m.embed.weight.detach().t_().unsqueeze_(0).squeeze_(0)
    assert view.shape == (WIDTH, ROWS)
    view[0, 3] = 7.0
    with torch.no_grad():
        m.up.weight.t_()
        m.down.weight.transpose_(0, 1)


def bits_written(m):
    m.up.weight.data.view(torch.int16)[0].fill_(1)
    m.up.bias.data.view(torch.int32).zero_()


def set_to_a_tensor(m):
    with torch.no_grad():
        m.up.weight.set_(new())
        m.down.weight.set_(torch.zeros(3 * WIDTH * WIDTH).untyped_storage(), 0, (WIDTH, WIDTH))


def in_the_dict_of_parameters(m):
    m.up._parameters["weight"] = nn.Parameter(new())


def swapped(m):
    torch.utils.swap_tensors(m.up.weight, nn.Parameter(new()))


def from_a_vector(m):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 2, m.parameters())


def copied_and_converted(m):
    return copy.deepcopy(m).half()


def parametrized(m):
    parametrize.register_parametrization(m.up, "weight", Symmetric())
    parametrizations.weight_norm(m.down)
    parametrizations.orthogonal(m.head)


def parametrized_and_removed(m):
    parametrize.register_parametrization(m.up, "weight", Symmetric())
    parametrize.remove_parametrizations(m.up, "weight")
    parametrizations.weight_norm(m.down)
    parametrize.remove_parametrizations(m.down, "weight")
    parametrize.register_parametrization(m.head, "weight", nn.Tanh())
    parametrize.remove_parametrizations(m.head, "weight", leave_parametrized=False)


def lazy(m):
    m.more = nn.LazyLinear(3)
    m.more(torch.ones(2, WIDTH))


def trained_by_hand(m):
    m(torch.arange(3)).square().mean().backward()
    for param in m.parameters():
        param.data.sub_(param.grad)
        param.grad = None


STORIES = [
    to_bfloat16,
    to_half_when_tied,
    to_a_dtype_and_back,
    to_half_in_part,
    to_half_in_a_list,
    to_half_as_new_parameters,
    to_half_by_swaps,
    from_meta_by_to_empty,
    from_meta_by_assign,
    loaded,
    initialised_by_apply,
    initialised_one_by_one,
    replaced,
    data_of_another_tensor,
    data_transposed,
    shape_changed_in_place,
    bits_written,
    set_to_a_tensor,
    in_the_dict_of_parameters,
    swapped,
    from_a_vector,
    copied_and_converted,
    parametrized,
    parametrized_and_removed,
    lazy,
    trained_by_hand,
]


def built(story, context):
    torch.manual_seed(3)
    with context():
        model = Net()
        model = story(model) or model
    return model


def told(story, config):
    """On a rank: builds under init() and without, and compares what an engine has."""
    import penstock  # noqa: PLC0415
    from penstock.front import sharded_init  # noqa: PLC0415

    plain = built(story, contextlib.nullcontext)
    model = built(story, functools.partial(penstock.init, timeout_s=20.0))
    held = sharded_init.waiting()
    theirs = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert held.holds(param), f"{name} is whole"
        assert (param.shape, param.dtype) == (theirs[name].shape, theirs[name].dtype), name
    settings = {"optimizer": {"type": "SGD", "lr": 0.1}, "comm": {"timeout_s": 20.0}}
    engine = penstock.initialize(model, settings | config)
    ours, expected = engine.state_dict(rank0_only=False), plain.state_dict()
    engine.close()
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].float().equal(value.float()), name


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_converted_as_a_plain_build(story, pools):
    pools(2).run(told, story, {"strategy": "zero3"})


@pytest.mark.parametrize("story", [to_bfloat16, data_transposed], ids=lambda story: story.__name__)
def test_converted_and_tiled(story, pools):
    pools(2).run(told, story, {"strategy": "zero3", "tiling": {"max_bytes": 100}})


def later():
    """Contexts after the first one, and a model that was built without any."""
    import penstock  # noqa: PLC0415
    from penstock.front import sharded_init  # noqa: PLC0415

    outer = Net()
    with penstock.init(timeout_s=20.0):
        model, meta = Net(), on_meta()
    with penstock.init(timeout_s=20.0):
        model.half()
        meta.to_empty(device="cpu")
        outer.half()
    held = sharded_init.waiting()
    assert all(held.holds(param) for one in (model, meta) for param in one.parameters())
    assert all(param.isfinite().all() for param in outer.parameters())
    engine = penstock.initialize(model, {"strategy": "zero3"})
    with penstock.init(timeout_s=20.0):
        pass
    engine.state_dict()
    engine.close()
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


def test_later_contexts(pools):
    pools(2).run(later)


INSIDE = (
    r"inside `with penstock\.init\(\):`, and clone\(\) it there before .* numpy\(\), tolist\(\)"
)
DTYPE = r'"Embedding.weight" would have dtype torch.float64.*Convert the model'
REFUSED = {
    "double": ("ConfigError", DTYPE, lambda m: m.double()),
    "data of a double": (
        "ConfigError",
        "would have dtype torch.float64",
        lambda m: setattr(m.up.weight, "data", new().double()),
    ),
    "a double": (
        "ConfigError",
        '"Linear.weight" would have dtype torch.float64',
        lambda m: nn.Linear(2, 2, dtype=torch.float64),
    ),
    "numpy": ("RuntimeError", INSIDE, lambda m: m.up.weight.detach().numpy()),
    "tolist": ("RuntimeError", INSIDE, lambda m: m.up.bias.tolist()),
    "print": ("RuntimeError", INSIDE, lambda m: repr(m.up.weight)),
    "share_memory": ("RuntimeError", INSIDE, lambda m: m.share_memory()),
    "resize_": (
        "ConfigError",
        r"resize_\(\) of a parameter from shape \(8,\) to \(16,\).*Assign a new",
        lambda m: m.up.bias.detach().resize_(16),
    ),
}


def refused(name):
    import penstock  # noqa: PLC0415

    kind, text, call = REFUSED[name]
    with penstock.init(timeout_s=20.0):
        model = Net()
        with pytest.raises(getattr(penstock, kind, RuntimeError), match=text):
            call(model)
    with penstock.init(timeout_s=20.0):
        Net().half()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, pools):
    pools(2).run(refused, name)


def outside(name):
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=20.0):
        model = Net()
    with pytest.raises(RuntimeError, match=r"inside `with penstock\.init\(\):`"):
        {
            "half": model.half,
            "load": lambda: model.load_state_dict(Net().state_dict()),
            "init": lambda: nn.init.zeros_(model.up.weight),
            "forward": lambda: model(torch.arange(2)),
        }[name]()


@pytest.mark.parametrize("name", ["half", "load", "init", "forward"])
def test_refused_outside(name, pools):
    pools(2).run(outside, name)
