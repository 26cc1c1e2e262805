"""penstock.init(): models that are in pieces from birth."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 24


class Net(nn.Module):
    """Initialised in the ways people do it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 7, 3, bias=False)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(1))
        self.table = nn.Parameter(torch.rand(3, 5) - 0.5)
        self.register_buffer("steps", torch.arange(6.0))
        nn.init.trunc_normal_(self.blocks[0].weight, std=0.02)
        nn.init.orthogonal_(self.blocks[1].weight)
        nn.init.xavier_uniform_(self.blocks[2].weight)
        self.blocks[3].weight.data.normal_(0, 0.3).clamp_(-0.5, 0.5)
        with torch.no_grad():
            self.blocks[4].weight[2:4].mul_(3.0)
            self.blocks[4].bias.copy_(self.blocks[3].bias)
            self.table[1] = float(self.scale) + torch.randn(5)
            self.norm.weight.add_(self.blocks[0].weight.mean())
            torch.add(self.norm.weight, 1.0, out=self.norm.bias)
            torch._foreach_mul_([block.bias for block in self.blocks], 0.5)
            torch._foreach_add_([self.table], [self.table + 1.0])
        self.apply(self.again)

    def again(self, module):
        if isinstance(module, nn.Conv1d):
            nn.init.kaiming_normal_(module.weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.conv(self.norm(x).transpose(1, 2))
        return x.square().mean() * self.scale.sum() + self.table.sum().square()


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.equal(theirs[name]), name


def build_and_compare(strategy, precision, path=""):
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    plain = Net().state_dict()
    after_plain = torch.get_rng_state()
    torch.manual_seed(3)
    with penstock.init(path=path):
        model = Net()
    assert torch.get_rng_state().equal(after_plain), "the random stream went another way"
    assert all(p.shape == plain[n].shape for n, p in model.named_parameters())
    with pytest.raises(RuntimeError, match=r"penstock\.init"):
        model.blocks[0].weight.sum()
    assert model.head.weight is model.embed.weight
    engine = penstock.initialize(model, {"strategy": strategy, "precision": precision})
    if dist.get_rank() == 0:
        same(engine.state_dict(), plain)
    else:
        engine.state_dict()
    tokens = torch.randint(10, (2, 6))
    engine.backward(engine(tokens))
    assert engine.step()
    engine.close()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_values_are_those_of_a_plain_build(strategy, world, pools):
    pools(world).run(build_and_compare, strategy, "fp32")


def test_in_bf16(pools):
    pools(2).run(build_and_compare, "zero3", "bf16")


def test_on_disk(pools, tmp_path):
    pools(2).run(build_and_compare, "zero3", "fp32", str(tmp_path))
    assert not list(tmp_path.iterdir())


def swap_file(path):
    """Whether this process has a file open in the folder; swap files have no name there."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return any(os.path.realpath(link).startswith(f"{path}/") for link in links)


def another_path(path):
    import penstock  # noqa: PLC0415

    with penstock.init():
        model = nn.Linear(4, 4)
    with penstock.init(path=path):
        other = nn.Linear(4, 4)
        with penstock.init():  # in the place of the outer context
            inner = nn.Linear(4, 4)
    assert swap_file(path)
    for one in (model, other, inner):
        penstock.initialize(one).close()
    assert not swap_file(path)
    with pytest.raises(penstock.ConfigError, match="none"):
        with penstock.init(path="/none"):
            pass


def test_a_path_is_never_ignored(pools, tmp_path):
    pools(2).run(another_path, str(tmp_path))


def ranks_seeded_apart():
    import penstock  # noqa: PLC0415

    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    with penstock.init():
        model = Net()
    if dist.get_rank() > 0:
        assert torch.get_rng_state().equal(before), "the rank's own stream was not given back"
    engine = penstock.initialize(model, {"strategy": "zero3"})
    found = engine.state_dict()
    engine.close()
    torch.manual_seed(0)
    if found:
        same(found, Net().state_dict())


def test_every_rank_builds_rank_0s_values(pools):
    pools(2).run(ranks_seeded_apart)


def load_inside():
    import penstock  # noqa: PLC0415

    torch.manual_seed(5)
    saved = Net().state_dict()
    with penstock.init():
        model = Net()
    with pytest.raises(RuntimeError, match=r"penstock\.init"):
        model.load_state_dict(saved)
    with penstock.init():
        model.load_state_dict(saved)
        first, second = Net(), None  # one that nobody keeps
        del first, second
    gc.collect()
    engine = penstock.initialize(model, {"strategy": "zero3"})
    found = engine.state_dict()
    if found:
        same(found, saved)
    engine.close()


def test_load_state_dict_inside_the_context(pools):
    pools(2).run(load_inside)


def peak_kib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def build_large(layers, width):
    import penstock  # noqa: PLC0415

    with penstock.init():  # what is loaded on first use does not count
        first = nn.Linear(8, 8)
    penstock.initialize(first, {"strategy": "zero3"}).close()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak_kib()
    with penstock.init():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    built = peak_kib() - before
    engine = penstock.initialize(
        model,
        {"strategy": "zero3", "units": {"max_bytes": width * width * 4}},
        optimizer={"type": "SGD", "lr": 0.1},
    )
    adopted = peak_kib() - before
    assert len(engine._core.units) == layers + 1
    return built, adopted


def test_memory_is_the_share_and_a_unit(pools):
    layers, width = 16, 1024  # 64 MiB in fp32
    unit = width * width * 4 // 1024
    share = layers * unit // 4
    for built, adopted in pools(4).run(build_large, layers, width):
        # The share, the parameter that is being made with its own copy, and some slack.
        assert built < share + 3 * unit + 4096, f"{built} KiB for a share of {share}"
        assert adopted < share + 4 * unit + 8192, f"{adopted} KiB for a share of {share}"


def build_on_disk(layers, width, path):
    import penstock  # noqa: PLC0415

    with penstock.init(path=path):
        nn.Linear(8, 8)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak_kib()
    with penstock.init(path=path):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    built = peak_kib() - before
    config = {
        "offload": {"optimizer": "disk", "params": "disk", "path": path},
        "units": {"max_bytes": width * width * 4},
    }
    engine = penstock.initialize(model, config)
    adopted = peak_kib() - before
    assert engine.ledger()["measured"]["disk"] >= 12 * layers * width * width // 2
    return built, adopted


def test_memory_is_a_unit_where_all_is_on_disk(pools, tmp_path):
    layers, width = 48, 1024  # 192 MiB in fp32, and 576 MiB with AdamW's state
    unit = width * width * 4 // 1024
    for built, adopted in pools(2).run(build_on_disk, layers, width, str(tmp_path)):
        assert built < 4 * unit + 8192, f"{built} KiB for a parameter of {unit}"
        assert adopted < 5 * unit + 8192, f"{adopted} KiB for a unit of {unit}"
    assert not list(tmp_path.iterdir())
