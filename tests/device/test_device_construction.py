"""Models that are sharded while they are built, loaded or moved: on the CPU and on a device, every
way gives the values and the training of a model that was built whole."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import warnings

import on_device
import pytest
import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS = 24, 20
HOST, DISK = "host", "disk"
TIERS = {
    "device": {},
    "optimizer-host": {"optimizer": HOST},
    "all-host": {"optimizer": HOST, "params": HOST, "gradients": HOST},
    "all-disk": {"optimizer": DISK, "params": DISK, "gradients": DISK},
}
SETTINGS = {"optimizer": {"type": "AdamW", "lr": 1e-2}, "comm": {"timeout_s": 30.0}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, persistent buffers and others, and a parameter of one value."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("table", torch.rand(WIDTH))
        with torch.device("cpu"):  # as accelerate.init_empty_weights() leaves buffers
            self.register_buffer("offset", torch.arange(float(WIDTH)) / 9, persistent=False)
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x * self.table.to(x.dtype) + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def plain():
    torch.manual_seed(3)
    return Net()


def saved(folder, values=None):
    """A folder of two files with an index, written by rank 0."""
    from safetensors.torch import save_file  # noqa: PLC0415

    values = values or {n: v.clone() for n, v in plain().state_dict().items() if n != "head.weight"}
    files = {n: f"model-0000{1 + ('blocks' in n)}-of-00002.safetensors" for n in values}
    if dist.get_rank() == 0:
        for file in set(files.values()):
            own = {n: v.contiguous() for n, v in values.items() if files[n] == file}
            save_file(own, os.path.join(folder, file))
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as index:
            import json  # noqa: PLC0415

            json.dump({"metadata": {}, "weight_map": files}, index)
    dist.barrier()
    return folder


def by_init(place, folder):
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=30.0, device=place):
        return plain()


def on_the_device(place, folder):
    """Parameters that modules make on the device itself, with values of the CPU's generator."""
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=30.0, device=place):
        model = plain()
        for block in model.blocks:
            block.to(place)
        assert model.blocks[0].up.weight.device == torch.device(place)
    return model


def from_files(place, folder):
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=30.0, device=place, weights=folder):
        return Net()


def from_files_on_meta(place, folder):
    import penstock  # noqa: PLC0415

    with penstock.init(timeout_s=30.0, device=place, weights=folder), torch.device("meta"):
        return Net()


def moved(place, folder):
    return plain()


WAYS = [by_init, on_the_device, from_files, from_files_on_meta, moved]


def trained(model, place, config, device=None):
    """The values after initialize() and the losses of three steps."""
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(model, SETTINGS | config, device=device)
    assert {p.device for p in model.parameters()} == {torch.device(place)}
    assert {b.device for b in model.buffers()} == {torch.device(place)}
    state = engine.state_dict(rank0_only=False, device="cpu")
    tokens = torch.arange(12).to(place)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens + 1) % ROWS)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return state, losses


def by_torch():
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, tokens = [], torch.arange(12)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % ROWS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def place_of(kind):
    if kind == "cpu":
        return "cpu"
    on_device.schedule(1)
    return on_device.device()


def every_way(kind, strategy, tier, precision, folder):
    place = place_of(kind)
    offload = dict(TIERS[tier])
    if DISK in offload.values():
        offload["path"] = os.path.join(folder, "swap")
        os.makedirs(offload["path"], exist_ok=True)
    config = {"strategy": strategy, "precision": precision, "offload": offload}
    expected = plain().state_dict()
    model = plain().to(place)
    model.head.weight = model.embed.weight  # on the simulated device to() unties weights
    state, losses = trained(model, place, config)
    assert all(state[name].equal(value) for name, value in expected.items())
    if precision == "fp32":
        assert losses == pytest.approx(by_torch(), abs=2e-5)
    weights = saved(folder)
    for way in WAYS:
        if way is on_the_device and kind == "cpu":
            continue
        model = way(place, weights)
        told, again = trained(model, place, config, device=place if way is moved else None)
        assert told.keys() == expected.keys(), way.__name__
        for name, value in expected.items():
            assert told[name].equal(value), (way.__name__, name)
        assert again == losses, way.__name__


def cells():
    found = []
    kinds = ["cpu", on_device.NAME]
    for kind, strategy, tier in itertools.product(kinds, ["ddp", "zero1", "zero3"], TIERS):
        if tier.startswith("all") and strategy != "zero3":
            continue
        found.append((kind, strategy, tier, ("fp32", "bf16")[len(found) % 2]))
    return found


@pytest.mark.parametrize("cell", cells(), ids="-".join)
def test_every_way_gives_the_same(cell, pools, device_pools, tmp_path):
    pytest.importorskip("safetensors")
    (pools if cell[0] == "cpu" else device_pools)(2).run(every_way, *cell, str(tmp_path))


# ---- transformers


def pretrained(folder):
    """from_pretrained() under init() and the files alone give the training of plain torch."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    place = torch.device(on_device.device())
    small = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": ROWS, "n_positions": 16}
    config = GPT2Config(**small, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    torch.manual_seed(4)
    model = GPT2LMHeadModel(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    tokens, losses = torch.arange(12)[None], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tokens = tokens.to(place)
    for weights in (None, folder):
        with penstock.init(timeout_s=30.0, weights=weights):
            if weights is None:
                model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
                assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
            else:
                model = GPT2LMHeadModel(config)
        engine = penstock.initialize(model.train(), SETTINGS, strategy="zero3")
        assert model.device == place
        for expected in losses:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(expected, abs=1e-5)
        engine.close(gather=False)


def test_models_of_transformers(device_pools, tmp_path):
    pytest.importorskip("transformers")
    device_pools(2).run(pretrained, str(tmp_path))


# ---- the choice of a device


def chosen(folder):
    """Without a device: the accelerator for a model of init(); a model on the CPU stays there."""
    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    own = torch.device(on_device.device())
    with penstock.init(timeout_s=30.0):
        model = nn.Linear(4, 4)
    engine = penstock.initialize(model, SETTINGS)
    assert model.weight.device == own
    engine.close(gather=False)
    with penstock.init(timeout_s=30.0):
        model = nn.Linear(4, 4)
    engine = penstock.initialize(model, SETTINGS, device="cpu")
    assert model.weight.device.type == "cpu"
    engine.close()
    model = nn.Linear(4, 4)
    with pytest.warns(RuntimeWarning, match=r"pass initialize\(device="):
        engine = penstock.initialize(model, SETTINGS)
    engine.close()
    engine = penstock.initialize(model.to(own), SETTINGS, device="cpu")  # back to the host
    assert model.weight.device.type == "cpu"
    engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = penstock.initialize(nn.Linear(4, 4), SETTINGS, device="cpu")
    engine.close()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    comm = {"comm": SETTINGS["comm"]}
    engine = penstock.initialize(model, comm, optimizer=optimizer, device=own)
    assert model.weight.device == own and optimizer.param_groups[0]["params"][0] is model.weight
    engine.close()


def test_a_device_is_chosen(device_pools, tmp_path):
    device_pools(2).run(chosen, str(tmp_path))


def random_on_the_device(folder):
    """Device generators are torch's own: every rank draws the values of rank 0."""
    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    place = on_device.device()
    torch.manual_seed(7)
    with torch.device(place):
        expected = nn.Linear(5, 5).state_dict()
    torch.manual_seed(7 + dist.get_rank())
    with penstock.init(timeout_s=30.0, device=place), torch.device(place):
        model = nn.Linear(5, 5)
    engine = penstock.initialize(model, SETTINGS | {"strategy": "zero3"})
    ours = engine.state_dict(rank0_only=False)
    engine.close()
    assert all(ours[name].equal(value.cpu()) for name, value in expected.items())


def test_values_of_a_devices_generator(device_pools, tmp_path):
    device_pools(2).run(random_on_the_device, str(tmp_path))


def parameter_elsewhere(penstock, place, folder):
    with penstock.init(device=place):
        other = (torch.device(place).index + 1) % on_device.count()
        nn.Linear(4, 4, device=f"{on_device.NAME}:{other}")


def no_such_device(penstock, place, folder):
    with penstock.init(device="xpu"):
        pass


def no_such_index(penstock, place, folder):
    penstock.initialize(nn.Linear(4, 4), device=f"{on_device.NAME}:99")


def two_devices(penstock, place, folder):
    with penstock.init(timeout_s=30.0, device=place):
        one = nn.Linear(4, 4)
    with penstock.init(timeout_s=30.0, device="cpu"):
        other = nn.Linear(4, 4)
    penstock.initialize(nn.Sequential(one, other), SETTINGS)


REFUSED = {
    parameter_elsewhere: "made on .*:., but this penstock.init.. is for a model that trains on",
    no_such_device: "this machine has",
    no_such_index: "this process has . of them",
    two_devices: r'"0.weight" was built for .* and "1.weight" for cpu',
}


def refused(name):
    import penstock  # noqa: PLC0415

    case = next(one for one in REFUSED if one.__name__ == name)
    on_device.schedule(0)
    with pytest.raises(penstock.ConfigError, match=REFUSED[case]):
        case(penstock, on_device.device(), "")


@pytest.mark.parametrize("name", [case.__name__ for case in REFUSED])
def test_devices_that_are_refused(name, device_pools):
    device_pools(2).run(refused, name)


# ---- memory


class Deep(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def resident_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def peaks(how, folder, layers, width, budget):
    """Trains two steps; the peaks of device and host in KiB.

    `how`: "built" or "meta", and the tier of the optimizer's state.
    """
    import sim  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    sim.set_delays_us(0, 0)
    place = on_device.device()
    device, host = budget
    sim.set_memory_limit(device)
    build = functools.partial(Deep, layers, width)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(place)
    with penstock.init(timeout_s=60.0):  # what is loaded on first use does not count
        first = Deep(1, 8)
    penstock.initialize(first, SETTINGS, strategy="zero3").close()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident_kib()
    with penstock.init(timeout_s=60.0, weights=folder):
        if how[0] == "meta":
            with torch.device("meta"):
                model = build()
        else:
            model = build()
    built = peak_kib_now() - before
    engine = penstock.initialize(
        model,
        SETTINGS | {"comm": {"timeout_s": 60.0}},
        strategy="zero3",
        precision="bf16",
        offload={"optimizer": how[1], "gradients": HOST}
        | ({"path": folder} if how[1] == DISK else {}),
        memory={"host_bytes": host, "device_bytes": device},
        units={"max_bytes": 4 * width * width},
        prefetch_bytes=2 * width * width,
    )
    losses = []
    for _ in range(2):
        loss = engine(x.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    ledger = engine.ledger()["measured"]
    used = torch.sim.max_memory_allocated() // 1024
    engine.close(gather=False)
    sim.set_memory_limit(4 << 30)
    # What is on the simulated device is host memory of this process, too.
    return built, peak_kib_now() - before - used, used, ledger, losses


def peak_kib_now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def write_deep(folder, layers, width):
    """One file with bf16 values, written tensor by tensor, and the losses of plain torch."""
    from safetensors.torch import save_file  # noqa: PLC0415

    torch.manual_seed(5)
    values = {
        f"layers.{i}.weight": (torch.randn(width, width) * width**-0.5).bfloat16()
        for i in range(layers)
    }
    save_file(values, os.path.join(folder, "model.safetensors"))
    return values


def deep_losses(values, layers, width):
    """Training in bf16 with fp32 masters, as the engine does, on one process."""
    model = Deep(layers, width)
    model.load_state_dict(values)
    low = Deep(layers, width).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    losses = []
    for _ in range(2):
        low.load_state_dict(model.state_dict())
        loss = low(x).float().square().mean()
        low.zero_grad()
        loss.backward()
        for ours, theirs in zip(model.parameters(), low.parameters(), strict=True):
            ours.grad = theirs.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(on_device.NAME != "sim", reason="only there can memory be made small")
@pytest.mark.parametrize("how", ["built", "meta"])
def test_a_model_that_fits_neither_device_nor_host(how, device_pools, tmp_path):
    layers, width, mib = 40, 1024, 1 << 20
    unit, whole = width * width, layers * width * width  # 1 Mi parameters of 40 Mi
    losses = deep_losses(write_deep(tmp_path, layers, width), layers, width)
    device, host = 64 * mib, 400 * mib
    assert 2 * whole > device and 14 * whole > host
    run = device_pools(2).run(peaks, (how, HOST), str(tmp_path), layers, width, (device, host))
    for built, on_host, on_device_kib, ledger, told in run:
        share = 0 if how == "meta" else 4 * whole // 2  # the shard of the initialised model
        assert built * 1024 < share + 4 * 4 * unit + 8 * mib, (built, share)
        assert on_device_kib * 1024 < device
        assert on_host * 1024 < host + 4 * 4 * unit + 32 * mib, (on_host, ledger)
        assert ledger["host"] <= host and ledger["device"] <= device, ledger
        assert told == pytest.approx(losses, rel=2e-3)
