"""Cases of test_simulated.py that run in a process of their own, as the device is the process's.
Each leaves the switches as it found them."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import sim
import torch
from device_model import Training, build, train
from torch.autograd.graph import save_on_cpu

F32 = torch.float32

# Settings of torch's fused AdamW.
FUSED = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of what a call raises; of nothing if it does not."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def trains_as_the_cpu(case: Training, delay_us: int) -> None:
    expected = train("cpu", case)
    sim.set_seed(delay_us)
    sim.set_delays_us(0, delay_us)
    assert train("sim", case) == expected
    sim.set_delays_us(0, 0)


def saved_on_the_host() -> None:
    def context() -> Any:
        return save_on_cpu(pin_memory=True, device_type="sim")

    sim.set_delays_us(0, 50)
    assert train("sim", Training(context=context)) == train("cpu", Training())
    sim.set_delays_us(0, 0)


def no_waits_in_a_step() -> None:
    """Forward, backward and AdamW of a GPT with dropout do not wait for the device once."""
    model = build("sim", dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 8, dtype=torch.long, device="sim")
    for step in range(3):
        if step == 2:  # those before make the optimizer's state and fill the allocator's cache
            sim.reset_counters()
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    counted = sim.counters()
    assert (counted.host_waits, counted.synchronous_operators) == (0, []), counted
    assert counted.kernels > 50


def counters() -> None:
    pageable, pinned = torch.zeros(10), torch.zeros(10).pin_memory()
    kept = [torch.empty(10, device="sim") for _ in range(8)]
    del kept  # leaves memory in the cache
    sim.reset_counters()
    device = pageable.to("sim")
    device.copy_(pinned, non_blocking=True)
    pinned.copy_(device, non_blocking=True)
    device.clone()
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert device.sum().item() == 0
    assert device.nonzero().numel() == 0
    counted = sim.counters()
    assert counted.h2d == sim.Tally(2, 80) and counted.d2h == sim.Tally(1, 40), counted
    assert counted.d2d == sim.Tally(1, 40)
    assert counted.host_waits_by_name == {
        "copy_h2d": 1,
        "event": 1,
        "stream": 1,
        "device": 1,
        "item": 1,
        "operator aten::nonzero": 1,
    }
    assert counted.host_waits == 6
    assert counted.synchronous_operators == ["aten::nonzero"]
    assert counted.kernels == 2
    sim.reset_counters()
    assert sim.counters().host_waits == 0


def new_memory() -> None:
    """Counts what the allocators' caches do not have. Waits for it only if it should."""
    torch.accelerator.empty_cache()
    sim.reset_counters()
    for _ in range(2):
        torch.empty(3 << 20, dtype=torch.uint8, device="sim")
        torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
    assert sim.counters().host_waits_by_name == {"allocator": 1, "pinned": 1}
    torch.empty(5 << 20, dtype=torch.uint8, device="sim")
    assert sim.counters().host_waits_by_name == {"allocator": 2, "pinned": 1}

    def is_late(make: Callable[[], torch.Tensor]) -> bool:
        """Whether slow kernels of another device still run when the memory is there."""
        sim.set_seed(0)
        with torch.sim.device(1):
            for _ in range(30):
                torch.ones(1, device="sim")
        make()
        late = not torch.accelerator.current_stream(1).query()
        torch.accelerator.synchronize(1)
        return late

    sim.set_delays_us(20000, 20000)  # longer than a busy machine needs to make memory
    for waits, size in ((False, 9 << 20), (True, 17 << 20)):  # which nobody has asked for before
        sim.set_allocations_wait(waits)
        for options in ({"device": "sim:0"}, {"pin_memory": True}):
            make = functools.partial(torch.empty, size, dtype=torch.uint8, **options)
            assert is_late(make) != waits
            assert is_late(make), "what is in the cache does not wait"
    sim.set_allocations_wait(False)
    sim.set_delays_us(0, 0)


def traffic() -> None:
    """Bytes that kernels read and write, and bytes that tensors get."""
    x = torch.ones(1000, device="sim")

    def counted(work: Callable[[], Any]) -> tuple[int, int]:
        sim.reset_counters()
        work()
        now = sim.counters()
        assert now.traffic.bytes == sum(one.bytes for one in now.traffic_by_name.values())
        assert now.traffic.count == now.kernels + now.d2d.count
        return now.traffic.bytes, now.temporaries.bytes

    norm = torch.linalg.vector_norm
    low = x.bfloat16()
    for work, expected in (
        (lambda: x + 1, (8000, 4000)),
        (lambda: x.add_(x), (12000, 0)),
        (lambda: x.mul_(0.5), (8000, 0)),
        (lambda: x.fill_(1), (4000, 0)),
        (lambda: torch.add(x, 1, out=x), (8000, 0)),
        (lambda: x + x[:1].expand(1000), (8004, 4000)),
        (lambda: x[:500] + 1, (4000, 2000)),
        (lambda: x.double(), (12000, 8000)),
        (lambda: x.view(torch.uint8)[8:], (0, 0)),
        (lambda: x.index_select(0, torch.zeros(5, dtype=torch.long, device="sim")), (120, 60)),
        (lambda: norm(x), (4004, 4)),
        (lambda: norm(x, dtype=torch.double), (4000 + 2 * 8000 + 8, 8000 + 8)),
        (lambda: norm(low, dtype=torch.float), (2004, 4)),
        (lambda: norm(low, dtype=torch.double), (2000 + 2 * 8000 + 8, 8000 + 8)),
        (lambda: torch._foreach_mul_([x, low], 2), (2 * 6000, 0)),
    ):
        assert counted(work) == expected, expected
    assert sim.counters().traffic_by_name == {"aten::_foreach_mul_.Scalar": sim.Tally(1, 12000)}
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    norm(x, dtype=torch.double)
    assert torch.accelerator.max_memory_allocated() - before >= 8000


def traffic_of_fused_adamw() -> None:
    """Gradients are written only if they are scaled."""
    for scale, passes in ((None, 7), (torch.ones((), device="sim"), 8)):
        lists = [[torch.ones(1000, device="sim")] for _ in range(4)]
        count = torch.ones((), device="sim")
        sim.reset_counters()
        torch._fused_adamw_(
            *lists,
            [],
            [count],
            **FUSED,
            grad_scale=scale,
        )
        assert sim.counters().traffic.bytes == 4000 * passes + 4 + (0 if scale is None else 4)
        assert sim.counters().temporaries == sim.Tally()


def out_of_memory() -> None:
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_reserved()
    sim.set_memory_limit(used + (4 << 20))
    kept = torch.ones(1 << 18, device="sim")
    kind, text = raised(lambda: torch.empty(2 << 20, device="sim"))
    assert kind == "OutOfMemoryError" and "8388608 bytes on device 0" in text, (kind, text)
    # What is cached is given back before it fails, also what another stream still uses.
    side = torch.Stream("sim")
    blocks = [torch.ones(1 << 17, device="sim") for _ in range(4)]
    sim.set_delays_us(100, 100)
    for block in blocks:
        with side:
            block.mul_(2)
        block.record_stream(side)
    del blocks, block
    assert torch.full((1 << 19,), 3.0, device="sim").sum().item() == 3 << 19
    assert kept.sum().item() == 1 << 18
    sim.set_delays_us(0, 0)
    sim.set_memory_limit(4 << 30)
    torch.empty(2 << 20, device="sim")


def pinned_memory() -> None:
    device = torch.arange(1000.0, device="sim")
    pinned = torch.empty(1000, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(1).is_pinned()
    assert pinned.data_ptr() % 4096 == 0 and pinned[10:].is_pinned()
    sim.set_delays_us(1000, 1000)

    def copies_behind(target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether the host goes on before a copy is done that has to wait for 30 slow kernels."""
        sim.set_seed(0)
        for _ in range(30):
            torch.ones(1, device="sim")
        target.copy_(source, non_blocking=True)
        done = torch.accelerator.current_stream().query()
        torch.accelerator.synchronize()
        return not done

    assert copies_behind(pinned, device) and copies_behind(device, pinned)
    assert not copies_behind(torch.empty(1000), device)
    assert not copies_behind(device, torch.zeros(1000))
    assert not copies_behind(device, torch.zeros(1000, dtype=torch.double).pin_memory())
    sim.set_delays_us(0, 0)

    address = pinned.data_ptr()
    pinned.fill_(1)
    del pinned
    again = torch.empty(1000, pin_memory=True)
    assert again.data_ptr() == address and again.isnan().all()

    sim.set_pinning_fails(True)
    kind, text = raised(lambda: torch.empty(10, pin_memory=True))
    assert kind == "RuntimeError" and "cannot pin 40 bytes" in text
    sim.set_pinning_fails(False)
    torch.empty(10, pin_memory=True)


def redzones() -> None:
    def beyond(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        storage = window(tensor.untyped_storage().data_ptr() + 4 * first, 4 * count)
        return torch.empty(0, device="sim").set_(storage, 0, (count,), (1,))

    block = torch.zeros(10, device="sim")
    for first, count in ((10, 1), (-2, 2), (8, 3)):
        kind, text = raised(beyond(block, first, count).zero_)
        assert kind == "RuntimeError" and "a kernel" in text, text
    sim.check_redzones()
    # What a kernel does by itself with a wrong index is seen when its block is verified.
    for first, told in ((10, "0 bytes were written before and 4 after a block of 40 bytes"),):
        sim.write_wrongly(block.data_ptr() + 4 * first)
        kind, text = raised(sim.check_redzones)
        assert kind == "RuntimeError" and told in text, text
        del block  # frees it, which verifies as well
        kind, text = raised(torch.accelerator.synchronize)
        assert kind == "AcceleratorError" and told in text, text
        # The error stays until it is reset.
        assert told in raised(lambda: torch.empty(1, device="sim"))[1]
        sim.reset_errors()
        torch.accelerator.synchronize()
    block = torch.zeros(10, device="sim")
    beyond(block, 0, 10).zero_()
    sim.check_redzones()


def window(address: int, count_bytes: int) -> torch.UntypedStorage:
    """Device memory at an address, without an owner."""
    return torch._C._construct_storage_from_data_pointer(
        address, torch.device("sim", 0), count_bytes
    )


def asynchronous_errors() -> None:
    """A kernel's error reaches the host at the next synchronization, not at the launch; wrong
    arguments are refused at the launch."""
    index = torch.tensor([5], device="sim")
    torch.zeros(3, device="sim").index_select(0, index)
    kind, text = raised(torch.accelerator.synchronize)
    assert kind == "AcceleratorError" and "aten::index_select" in text, (kind, text)
    sim.reset_errors()
    x = torch.zeros(2, 3, device="sim")
    assert raised(lambda: x @ x)[0] == "RuntimeError"
    assert "on the same device" in raised(lambda: x + torch.zeros(3))[1]
    assert "on the same device" in raised(lambda: x + torch.zeros(3, device="sim:1"))[1]
    torch.accelerator.synchronize()
    null = torch.empty(0, device="sim").set_(window(0, 16), 0, (4,), (1,))
    null.zero_()
    assert "illegal memory access" in raised(torch.accelerator.synchronize)[1]
    sim.reset_errors()


def side_streams() -> None:
    """Autograd on a side stream, events with times, and streams of threads that end."""
    expected = train("cpu", Training())
    sim.set_delays_us(0, 100)
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        assert train("sim", Training()) == expected
    sim.set_delays_us(0, 0)

    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(10, device="sim").add_(1)
    second.record()
    second.synchronize()
    assert first.query() and first.elapsed_time(second) >= 0

    def on_another_stream() -> None:
        stream = torch.Stream("sim:1")
        torch.accelerator.set_device_index(1)
        torch.accelerator.set_stream(stream)
        event.wait(stream)
        sums.append((torch.ones(5, device="sim") * 2).sum().item())

    sums: list[float] = []
    event = torch.accelerator.current_stream().record_event()
    threads = [threading.Thread(target=on_another_stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [10.0] * 4 and torch.accelerator.current_device_index() == 0


def two_devices() -> None:
    sim.set_delays_us(0, 100)
    for seed in range(20):
        sim.set_seed(seed)
        a = torch.arange(100.0, device="sim:0") * 2
        b = a.to("sim:1")
        a.zero_()  # behind the copy
        c = (b + 1).to("sim:0")
        assert b.device.index == 1 and c.sum().item() == 2 * 4950 + 100
    sim.set_delays_us(0, 0)
    with torch.sim.device(3):
        assert torch.empty(1, device="sim").device.index == 3
    assert torch.accelerator.device_count() == sim.DEVICES == 8


def ranks_as_threads() -> None:
    """Four threads, each with a device of its own, training at the same time."""
    expected = train("cpu", Training())
    got: dict[int, Any] = {}

    def rank(index: int, model: torch.nn.Module) -> None:
        with torch.sim.device(index):
            got[index] = train("sim", Training(wrap=lambda _: model))

    models = [build(f"sim:{index}") for index in range(4)]
    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(models)]
    sim.set_delays_us(0, 50)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sim.set_delays_us(0, 0)
    assert [got.get(index) == expected for index in range(4)] == [True] * 4


def kept_and_copied() -> None:
    """torch.save, torch.load, deepcopy, storages and views."""
    tensor = torch.arange(6.0, device="sim").view(2, 3)
    file = io.BytesIO()
    torch.save({"all": tensor, "row": tensor[1]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["all"].device.type == "sim" and loaded["all"].cpu().equal(tensor.cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu")["row"].tolist() == [3, 4, 5]
    other = copy.deepcopy(tensor)
    other.t().add_(1)
    assert (other - tensor).sum().item() == 6
    assert tensor.view(torch.int32).view(torch.uint8).shape == (2, 12)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(24)
    tensor.fill_(2)
    assert tensor.sum().item() == 12


def random_numbers() -> None:
    """As the CPU's, also from two streams; the state can be kept."""
    torch.manual_seed(3)
    expected = [torch.randn(5), torch.rand(5), torch.randperm(9)]
    sim.set_delays_us(0, 100)
    torch.manual_seed(3)
    state = torch.sim.get_rng_state()
    for _ in range(2):
        side = torch.Stream("sim")
        got = [torch.randn(5, device="sim")]
        with side:
            got.append(torch.rand(5, device="sim"))
        side.synchronize()
        got.append(torch.randperm(9, device="sim"))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
        torch.sim.set_rng_state(state)
    sim.set_delays_us(0, 0)


def windows() -> None:
    """What an engine does with a flat buffer: tensors over parts of it, and kernels on them."""
    flat = torch.zeros(64, device="sim")
    parts = [
        torch.empty(0, device="sim").set_(window(flat.data_ptr() + 64 * i, 64), 0, (4, 4), (4, 1))
        for i in range(3)
    ]
    parts[0].copy_(torch.full((4, 4), 2.0))
    parts[1].add_(parts[0]).mul_(3)
    assert flat.sum().item() == 32 + 96
    norms = torch._foreach_norm(parts, dtype=torch.double)
    assert [norm.item() for norm in norms] == [8.0, 24.0, 0.0]
    assert torch.linalg.vector_norm(flat, dtype=torch.double).item() == 640**0.5
    assert torch.isfinite(flat).all().item() and (parts[0] != 2).sum().item() == 0
    assert parts[0].view(torch.int32)[0, 0].item() == 0x40000000
    parameter = parts[0].requires_grad_()
    parameter.grad = parts[2]
    calls = []
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.data_ptr()))
    for _ in range(2):
        (parameter * parts[1]).sum().backward()
    assert flat[32:48].sum().item() == 2 * 96 and calls == [parts[2].data_ptr()] * 2


def fused_adamw() -> None:
    """With the loss scale and the flag that skips the step, on the device."""

    def step(device: str, found: float) -> list[torch.Tensor]:
        made = [torch.linspace(0, 1, 10, device=device) + i for i in range(4)]
        counts = [torch.ones((), device=device)]
        torch._fused_adamw_(
            *([tensor] for tensor in made),
            [],
            counts,
            **FUSED,
            grad_scale=torch.full((), 4.0, device=device),
            found_inf=torch.full((), found, device=device),
        )
        return [tensor.cpu() for tensor in made]

    for found in (0.0, 1.0):
        assert all(map(torch.equal, step("sim", found), step("cpu", found)))


def mixed_precision() -> None:
    with torch.autocast("sim", torch.bfloat16):
        model = torch.nn.Linear(8, 8, device="sim")
        y = model(torch.ones(2, 8, device="sim"))
        assert y.dtype == torch.bfloat16 and y.float().softmax(-1).dtype == F32
        assert y.softmax(-1).dtype == F32
    y.sum().backward()
    assert model.weight.grad.dtype == F32


def other_layers() -> None:
    """What needs kernels of its own beside a GPT: equal to the CPU, recurrent cells but nearly."""

    def run(device: str, layers: list[torch.nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
        model = torch.nn.Sequential(*(copy.deepcopy(layer).to(device) for layer in layers))
        y = model(x.to(device))
        y = y[0] if isinstance(y, tuple) else y
        torch.nn.functional.mse_loss(y, torch.ones_like(y)).backward()
        return [y.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    nn = torch.nn
    image, sequence = torch.randn(2, 4, 8, 8), torch.randn(3, 5, 8)
    for layers, x, exact in (
        ([nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)], image, True),
        ([nn.BatchNorm2d(4).bfloat16(), nn.Flatten()], image.bfloat16(), True),
        ([nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8).bfloat16()], sequence.bfloat16(), True),
        ([nn.RMSNorm(8), nn.Softplus()], sequence, True),
        ([nn.LSTM(8, 6, 2)], sequence, False),
        ([nn.GRU(8, 6)], sequence, False),
    ):
        expected, got = run("cpu", layers, x), run("sim", layers, x)
        same = torch.equal if exact else torch.allclose
        assert all(map(same, got, expected)), layers
    z = torch.complex(image, image)
    assert torch.equal(z.to("sim").conj().resolve_conj().cpu(), z.conj().resolve_conj())


CASES = (
    other_layers,
    saved_on_the_host,
    no_waits_in_a_step,
    counters,
    new_memory,
    traffic,
    traffic_of_fused_adamw,
    out_of_memory,
    pinned_memory,
    redzones,
    asynchronous_errors,
    side_streams,
    two_devices,
    ranks_as_threads,
    kept_and_copied,
    random_numbers,
    windows,
    fused_adamw,
    mixed_precision,
)
