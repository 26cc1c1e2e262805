"""Host memory beside a device: what is pinned, where it begins, and what is copied from where."""

from __future__ import annotations

import on_device
import pytest
import sim
import torch
import torch.distributed as dist
import training
import zoo
from training import Case

pytestmark = pytest.mark.skipif(on_device.NAME != "sim", reason="only there it can be chosen")

WIDTH = 512  # of a layer whose parameters take a megabyte


def start(strategy="zero2", model=None, **config):
    """An engine on this rank's device, and its first samples there."""
    import penstock  # noqa: PLC0415 - the parent does without

    place = on_device.device()
    case = Case(strategy, "bf16", world=dist.get_world_size())
    torch.manual_seed(0)
    model = zoo.build("gpt") if model is None else model
    engine = penstock.initialize(model, case.config() | config, device=place)
    batch = training.rank_part(zoo.batches("gpt", case.samples)[0], 0)
    return engine, training.sent(batch, place)


def train(engine, batch, steps=2):
    losses = []
    for _ in range(steps):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def on_offsets(offload, folder):
    """The losses where pinned memory begins with a page, and 16 bytes later."""
    if "disk" in offload.values():
        offload = offload | {"path": folder}
    found = []
    for offset in (0, 16):
        on_device.schedule(1)
        sim.set_pinned_offset(offset)
        try:
            engine, batch = start("zero3", offload=offload)
            found.append(train(engine, batch, 3))
            engine.close()
        finally:
            sim.set_pinned_offset(0)
    return found


@pytest.mark.parametrize(
    "offload",
    (
        {"optimizer": "host"},
        {"optimizer": "disk", "params": "host"},
        {"optimizer": "disk", "params": "disk", "gradients": "disk"},
    ),
)
def test_pinned_memory_need_not_begin_with_a_page(offload, device_pools, tmp_path):
    """CUDA's does not with pinned_use_cuda_host_register, and disks read whole blocks."""
    for at_page, behind in device_pools(2).run(on_offsets, offload, str(tmp_path)):
        assert at_page == behind


def pinned(strategy, offload):
    """Bytes of pinned memory after a step, and the number of parameters of the rank's shard."""
    on_device.schedule(1)
    before = sim.pinned_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    engine, _ = start(strategy, model, offload=offload)
    x = torch.ones(2, WIDTH, device=on_device.device(), dtype=torch.bfloat16)
    engine.backward(engine(x).square().mean())
    engine.step()
    bytes_pinned = sim.pinned_bytes() - before
    engine.close()
    return bytes_pinned, sum(p.numel() for p in model.parameters()) // dist.get_world_size()


@pytest.mark.parametrize("strategy", ("zero1", "zero3"))
def test_masters_and_moments_are_not_pinned(strategy, device_pools):
    """They never cross: gradients (2 or 4 bytes) and new parameters (2) do."""
    for count, params in device_pools(2).run(pinned, strategy, {"optimizer": "host"}):
        assert 0 < count < 10 * params


def with_late_copies(folder):
    """Everything that copies memory of the user's or of files; the losses, and the weights."""
    found = []
    for late in (False, True):
        on_device.schedule(1)
        sim.set_delays_us(0, 400)
        sim.set_pageable_copies_are_late(late)
        try:
            engine, batch = start("zero3", offload={"optimizer": "host"})
            losses = train(engine, batch)
            weights = engine.state_dict(rank0_only=False)
            engine.load_state_dict({n: v * 1.5 for n, v in weights.items()})
            param = next(engine.module.parameters())
            with engine.gathered([param], write=True):
                param.data.copy_(torch.full(param.shape, 0.25))
            losses += train(engine, batch)
            engine.set_param_state(param, "exp_avg", torch.full(param.shape, 0.5))
            losses += train(engine, batch)
            engine.save(folder)
            losses += train(engine, batch)
            engine.load(folder)
            losses += train(engine, batch)
            weights = engine.state_dict(rank0_only=False)
            engine.close()
        finally:
            sim.set_pageable_copies_are_late(False)
            sim.set_delays_us(0, 50)
        found.append((losses, weights))
    (losses, weights), (others, other_weights) = found
    assert losses == others
    assert all(weights[name].equal(other_weights[name]) for name in weights)


def test_memory_that_goes_at_once_is_copied_first(device_pools, tmp_path):
    """Some machines copy pageable memory late; the engine frees such memory after the call."""
    device_pools(2).run(with_late_copies, str(tmp_path))


class Scaled(torch.nn.Module):
    """A layer with a buffer that its forward changes, and one that it does not."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.mask


def waits_of_recomputed_buffers():
    """By name, in three steps of six recomputed units with buffers."""
    on_device.schedule(1)
    model = torch.nn.Sequential(*(Scaled() for _ in range(6)))
    engine, _ = start("zero2", model, activations={"checkpoint": "unit"}, precision="fp32")
    x = torch.rand(4, 16, device=on_device.device())
    for step in range(6):
        if step == 3:  # until then the allocator's cache grows
            torch.accelerator.synchronize()
            sim.reset_counters()
        engine.backward(engine(x).square().mean())
        engine.step()
    waits = sim.counters().host_waits_by_name
    counts = {int(unit.norm.num_batches_tracked) for unit in model}
    engine.close()
    return waits, counts


def test_recomputed_buffers_wait_for_nothing(device_pools):
    for waits, counts in device_pools(2).run(waits_of_recomputed_buffers):
        del waits["generator"]  # reading its state waits here, but not on CUDA
        assert waits == {"copy_d2h": 3}, "the norm's, and no other"
        assert counts == {6}, "a recomputed forward does not count"


def added(precision):
    """The gradients of two backwards that are added on the host, and plain torch's."""
    import penstock  # noqa: PLC0415 - the parent does without

    on_device.schedule(3)
    sim.set_delays_us(0, 400)
    place = on_device.device()
    torch.manual_seed(5)
    layers = [torch.nn.Linear(2048, 2300), torch.nn.Tanh(), torch.nn.Linear(2300, 4)]
    model, samples = torch.nn.Sequential(*layers), torch.randn(2, 3, 2048)
    config = {
        "strategy": "zero2",
        "precision": precision,
        "batch": {"accumulate": 2},
        "offload": {"optimizer": "host", "gradients": "host"},
        "optimizer": {"type": "SGD", "lr": 0.0},
        "comm": {"timeout_s": 120},
    }
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for part in samples.to(dtype):
        (model.to(dtype)(part).float().square().mean() / 2).backward()
    plain = {name: one.grad.float() for name, one in model.named_parameters()}
    model.zero_grad()
    engine = penstock.initialize(model, config, device=place)
    sim.reset_counters()
    for part in samples.to(dtype).to(place):
        engine.backward(engine(part).float().square().mean())
    counted = sim.counters()
    ours = {name: one.float().cpu() for name, one in engine.full_grads().items()}
    engine.close(gather=False)
    sim.set_delays_us(0, 50)
    return plain, ours, counted.host_waits_by_name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_added_from_pinned_memory(precision, device_pools):
    """Piece by piece, while the next piece is on its way."""
    for plain, ours, waits in device_pools(1).run(added, precision):
        assert waits.get("copy_d2h", 0) == 0, f"a copy of pageable memory waits: {waits}"
        for name, value in plain.items():
            close = {"rtol": 2e-2, "atol": 1e-4} if precision == "bf16" else {}
            torch.testing.assert_close(ours[name], value, **close)


class Wide(torch.nn.Module):
    """An embedding and a head that are larger than the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4000, 128)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*self.layers()) for _ in range(6))
        self.head = torch.nn.Linear(128, 4000)

    @staticmethod
    def layers():
        yield from (torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.cross_entropy(self.head(x).float(), tokens)


def ledger(strategy, offload, accumulate):
    """What initialize() predicted and what the engine counted, in bytes, by tier."""
    on_device.schedule(2)
    settings = {"offload": offload, "batch": {"accumulate": accumulate}}
    engine, _ = start(strategy, Wide(), **settings)
    tokens = torch.arange(64, device=on_device.device())
    for _ in range(3 * accumulate):
        engine.backward(engine(tokens))
        engine.step()
    found = engine.ledger()
    engine.close()
    return found["predicted"][strategy], found["measured"]


LEDGERS = [
    ("ddp", {}, 1),
    ("zero1", {"optimizer": "host"}, 1),
    ("zero2", {}, 2),
    ("zero2", {"optimizer": "host"}, 1),
    ("zero2", {"optimizer": "host", "gradients": "host"}, 2),
    ("zero3", {}, 1),
    ("zero3", {"optimizer": "host"}, 2),
    ("zero3", {"optimizer": "host", "params": "host", "gradients": "host"}, 1),
]


@pytest.mark.parametrize(("strategy", "offload", "accumulate"), LEDGERS)
def test_the_ledger_tells_the_truth(strategy, offload, accumulate, device_pools):
    for predicted, measured in device_pools(2).run(ledger, strategy, offload, accumulate):
        for tier in ("device", "host"):
            told, counted = predicted[tier], measured[tier]
            assert abs(told - counted) <= 0.05 * max(told, counted), f"{tier}: {told}, {counted}"
