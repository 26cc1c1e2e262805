"""penstock.init(weights=...): a model gets its values from safetensors files, or an error says why
it cannot."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 6
SETTINGS = {"optimizer": {"type": "SGD", "lr": 0.1}, "comm": {"timeout_s": 20.0}}
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.rand(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.up(self.embed(tokens))))


def values_of(model=None):
    torch.manual_seed(1)
    state = (model or Net()).state_dict()
    return {name: value.clone() for name, value in state.items() if name != "head.weight"}


def write(folder, values):
    from safetensors.torch import save_file  # noqa: PLC0415

    if dist.get_rank() == 0:
        save_file(values, os.path.join(folder, "model.safetensors"))
    dist.barrier()


def opened(folder, **options):
    import penstock  # noqa: PLC0415

    return penstock.init(timeout_s=20.0, weights=folder, **options)


def built(folder, model=Net, **options):
    torch.manual_seed(2)
    with opened(folder, **options):
        return model()


def state_of(model, **config):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(model, {**SETTINGS, "strategy": "zero3", **config})
    state = engine.state_dict(rank0_only=False)
    engine.close()
    return state


def same(state, values):
    for name, value in values.items():
        assert state[name].dtype == value.dtype and state[name].equal(value), name


# ---- what is as load_state_dict()


def of_dtypes(folder):
    """Masters get the precision of the file; a frozen parameter and a buffer are rounded."""
    for stored in (torch.float64, torch.float16, torch.bfloat16):
        values = {
            n: v.to(stored) / 3 if v.is_floating_point() else v for n, v in values_of().items()
        }
        write(folder, values)
        model = Net()
        model.load_state_dict({**values, "head.weight": values["embed.weight"]})
        same(state_of(built(folder)), values_of(model))

    def low():
        return Net().bfloat16()

    values = values_of()
    write(folder, values)
    state = state_of(built(folder, low))
    same(state, {n: v for n, v in values.items() if "table" not in n and "running" not in n})
    assert state["table"].equal(values["table"].bfloat16())
    frozen = built(folder, low)
    frozen.up.weight.requires_grad_(False)
    assert state_of(frozen)["up.weight"].float().equal(values["up.weight"].bfloat16().float())


def tied(folder):
    """The last name in the file counts, as in torch; one is enough."""
    values = values_of()
    write(folder, values | {"head.weight": values["embed.weight"] + 1})
    model = built(folder)
    assert model.head.weight is model.embed.weight
    same(state_of(model), {"embed.weight": values["embed.weight"] + 1})
    write(folder, {n.replace("embed", "head"): v for n, v in values.items()})
    same(state_of(built(folder)), values)


def later_edits(folder):
    """An edit after the context is kept, and the rest is still read from the files."""
    import penstock  # noqa: PLC0415

    values = values_of()
    write(folder, values)
    model = built(folder)
    with penstock.init(timeout_s=20.0), torch.no_grad():
        assert model.up.weight.sum() == values["up.weight"].sum()  # the file's values are seen
        model.up.weight[0] = 7.0
        nn.init.zeros_(model.up.bias)
    twin = copy.deepcopy(model)
    values["up.weight"][0] = 7.0
    values["up.bias"].zero_()
    same(state_of(model), values)
    same(state_of(twin), values)


def odd_layouts(folder):
    """Parameters that are views, transposed, or were built outside."""
    outer = nn.Linear(WIDTH, WIDTH)

    def build():
        model = nn.Module()
        model.turned = nn.Parameter(torch.randn(3, WIDTH).t())
        model.part = nn.Parameter(torch.randn(40)[2:14].view(3, 4))
        model.none = nn.Parameter(torch.randn(0, 4))
        model.outer = outer
        return model

    values = values_of(build())
    write(folder, {n: v.contiguous() for n, v in values.items()})
    model = built(folder, build)
    state = state_of(model)
    assert all(state[n].equal(v) for n, v in values.items())


def in_tiles_and_ddp(folder):
    values = values_of()
    write(folder, values)
    for config in ({"tiling": {"max_bytes": 80}}, {"strategy": "ddp"}, {"strategy": "zero2"}):
        same(state_of(built(folder), **config), values)


def on_disk(folder):
    values = values_of()
    write(folder, values)
    place = os.path.join(folder, "swap")
    os.makedirs(place, exist_ok=True)
    offload = {"optimizer": "disk", "params": "disk", "path": place}
    same(state_of(built(folder, path=place), offload=offload), values)


def trimmed(folder):
    """strict=False keeps what the file has not, and says so on rank 0."""
    values = values_of()
    gone = values.pop("up.bias")
    write(folder, values | {"other": gone})
    torch.manual_seed(2)
    expected = Net().up.bias.detach()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = built(folder, strict=False)
    texts = [str(one.message) for one in told if "[front::init]" in str(one.message)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all('initial values: "up.bias"' in one and '"other"' in one for one in texts), texts
    same(state_of(model), {**values, "up.bias": expected})


def without_counts(folder):
    """Files of early torch have no num_batches_tracked, which torch allows."""
    values = values_of()
    del values["norm.num_batches_tracked"]
    write(folder, values)
    same(state_of(built(folder)), values)


def edits_inside(folder):
    """Writes after the constructor are replaced by the file's values, which a warning says."""
    import penstock  # noqa: PLC0415

    values = values_of()
    write(folder, values)

    def edited():
        model = Net()
        with torch.no_grad():
            model.up.bias.fill_(3.0)
        with penstock.init(timeout_s=20.0):
            model.up.weight.data = torch.zeros(WIDTH, WIDTH)
        return model

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = built(folder, edited)
    texts = [str(one.message) for one in told if "written to" in str(one.message)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all("2 parameters" in one and '"up.bias"' in one for one in texts), texts
    same(state_of(model), values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(folder)


def by_to_empty(folder):
    """A meta model from elsewhere gets memory and values inside the context."""
    values = values_of()
    write(folder, values)
    with torch.device("meta"):
        model = Net()
    with opened(folder):
        model.to_empty(device="cpu")
        model.head.weight = model.embed.weight  # torch unties it
    same(state_of(model), values)


def from_a_config(folder):
    """transformers' models are ordinary modules."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=17, n_positions=16)
    torch.manual_seed(4)
    plain = GPT2LMHeadModel(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
        # transformers leaves the prefix out for the base class only
    dist.barrier()
    state = state_of(built(folder, lambda: GPT2LMHeadModel(config)))
    same(state, {n: v for n, v in plain.state_dict().items()})


SAME = [
    of_dtypes,
    tied,
    later_edits,
    odd_layouts,
    in_tiles_and_ddp,
    on_disk,
    trimmed,
    without_counts,
    edits_inside,
    by_to_empty,
    from_a_config,
]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.__name__)
def test_as_load_state_dict(case, pools, tmp_path):
    pools(2).run(case, str(tmp_path))


# ---- meshes


def on_a_mesh(folder, mesh):
    import penstock  # noqa: PLC0415

    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    values = {n: v.clone() for n, v in plain.state_dict().items()}
    write(folder, values)
    torch.manual_seed(2)
    with opened(folder):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine = penstock.initialize(model, SETTINGS | mesh)
    state = engine.state_dict()
    if dist.get_rank() == 0:
        same(state, values)
    engine.close(gather=False)


MESHES = {
    "pipeline": {"mesh": {"pipeline": 2}, "batch": {"accumulate": 2}},
    "tensor": {"mesh": {"tensor": 2}, "parallel": {"rules": {"0": "column", "1": "row"}}},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_on_meshes(mesh, pools, tmp_path):
    pools(2).run(on_a_mesh, str(tmp_path), MESHES[mesh])


# ---- what is refused


def damaged(folder, change):
    """Rank 0 changes the file."""
    write(folder, values_of())
    path = pathlib.Path(folder, "model.safetensors")
    if dist.get_rank() == 0:
        change(path)
    dist.barrier()


def missing_key(folder):
    values = values_of()
    del values["up.bias"], values["table"]
    write(folder, values)
    built(folder)


def unexpected_key(folder):
    write(folder, values_of() | {"other.weight": torch.ones(2)})
    built(folder)


def wrong_shape(folder):
    write(folder, values_of() | {"up.weight": torch.ones(WIDTH, WIDTH + 1)})
    built(folder, strict=False)


def wrong_dtype(folder):
    write(folder, values_of() | {"up.weight": torch.ones(WIDTH, WIDTH, dtype=torch.int8)})
    built(folder)


def truncated(folder):
    damaged(folder, lambda path: os.truncate(path, path.stat().st_size - 4))
    built(folder)


def changed_meanwhile(folder):
    write(folder, values_of())
    model = built(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        os.utime(os.path.join(folder, "model.safetensors"), ns=(0, 0))
    dist.barrier()
    state_of(model)


def cut_meanwhile(folder):
    write(folder, values_of())
    model = built(folder)
    dist.barrier()
    path = pathlib.Path(folder, "model.safetensors")
    if dist.get_rank() == 0:
        os.truncate(path, 100)
    dist.barrier()
    state_of(model)


def no_such_file(folder):
    built(os.path.join(folder, "none"))


def not_a_path(folder):
    built(123)


def another_format(folder):
    if dist.get_rank() == 0:
        torch.save(values_of(), os.path.join(folder, "pytorch_model.bin"))
    dist.barrier()
    built(folder)


def index_of_other_files(folder):
    write(folder, values_of())
    path = pathlib.Path(folder)
    if dist.get_rank() == 0:
        (path / "model.safetensors").rename(path / "a.safetensors")
        named = dict.fromkeys([*values_of(), "further"], "a.safetensors")
        (path / INDEX).write_text(json.dumps({"weight_map": named}))
    dist.barrier()
    built(folder)


def index_outside(folder):
    if dist.get_rank() == 0:
        (pathlib.Path(folder) / INDEX).write_text(json.dumps({"weight_map": {"a": "../a"}}))
    dist.barrier()
    built(folder)


def other_files_on_a_rank(folder):
    from safetensors.torch import save_file  # noqa: PLC0415

    path = os.path.join(folder, f"{dist.get_rank()}.safetensors")
    save_file({n: v + dist.get_rank() for n, v in values_of().items()}, path)
    built(path)


def files_on_one_rank(folder):
    from safetensors.torch import save_file  # noqa: PLC0415

    path = os.path.join(folder, f"{dist.get_rank()}.safetensors")
    if dist.get_rank() == 0:
        save_file(values_of(), path)
    built(path)


def nested(folder):
    write(folder, values_of())
    with opened(folder):
        built(folder)


def two_models(folder):
    write(folder, values_of())
    built(folder, lambda: [Net(), nn.Linear(2, 2)])


def no_model(folder):
    write(folder, values_of())
    built(folder, lambda: None)


class Renames(Net):
    def _load_from_state_dict(self, state, prefix, *others):
        super()._load_from_state_dict({n.upper(): v for n, v in state.items()}, prefix, *others)


def own_loading(folder):
    write(folder, values_of())
    built(folder, Renames)


def meta_without_values(folder):
    values = values_of()
    del values["up.weight"]
    write(folder, values)
    with opened(folder, strict=False), torch.device("meta"):
        model = Net()
    state_of(model)


def meta_buffer(folder):
    write(folder, values_of())
    with opened(folder), torch.device("meta"):
        model = Net()
    state_of(model)


def meta_alone(folder):
    with torch.device("meta"):
        model = Net()
    state_of(model)


REFUSED = {
    missing_key: ("ConfigError", r'missing in the files: "table", "up.bias"\. strict=False'),
    unexpected_key: ("ConfigError", 'not in the model: "other.weight"'),
    wrong_shape: ("ConfigError", r'"up.weight" has shape \(6, 7\) in the file and \(6, 6\)'),
    wrong_dtype: ("ConfigError", '"up.weight" has dtype torch.int8 in the file and torch.float32'),
    truncated: ("RuntimeFault", "safetensors.*model.safetensors"),
    changed_meanwhile: ("RuntimeFault", "was changed after penstock.init|rank 0"),
    cut_meanwhile: ("RuntimeFault", "was changed after penstock.init|rank 0"),
    no_such_file: ("ConfigError", "which does not exist. Pass a safetensors file"),
    not_a_path: ("ConfigError", "weights is 123. Pass the path"),
    another_format: ("ConfigError", "which has neither model.safetensors nor .*convert"),
    index_of_other_files: ("RuntimeFault", 'in the index and in the files differ.*"further"'),
    index_outside: ("RuntimeFault", "outside its folder"),
    other_files_on_a_rank: ("RuntimeFault", "of rank 0 and of rank 1 are different"),
    files_on_one_rank: ("", "does not exist"),
    nested: ("ConfigError", "is inside another one with weights"),
    two_models: ("ConfigError", "a Net and a Linear was built|a Linear and a Net was built"),
    no_model: ("ConfigError", "but no model was built inside it"),
    own_loading: ("ConfigError", "Renames changes how its state_dict is loaded"),
    meta_without_values: ("ConfigError", 'missing in the files: "up.weight".*meta device has no'),
    meta_buffer: ("ConfigError", 'buffer "scratch" is on the meta device and has no values'),
    meta_alone: ("ConfigError", r"has no values.*penstock.init\(weights="),
}


def refused(name, folder):
    import penstock  # noqa: PLC0415

    case = next(one for one in REFUSED if one.__name__ == name)
    kind, text = REFUSED[case]
    kinds = getattr(penstock, kind) if kind else (penstock.ConfigError, penstock.RuntimeFault)
    with pytest.raises(kinds, match=text):
        case(folder)
    with penstock.init(timeout_s=20.0):  # the ranks still meet
        model = nn.Linear(2, 2)
    state_of(model)


@pytest.mark.parametrize("name", [case.__name__ for case in REFUSED])
def test_refused(name, pools, tmp_path):
    pools(2).run(refused, name, str(tmp_path))
