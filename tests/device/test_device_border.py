"""What people do around an engine, where the model is on a device."""

from __future__ import annotations

import on_device
import pytest
import sim
import torch
import training
import zoo
from training import Case

CASE = Case("zero3", "bf16", world=2)


def start(strategy="zero3", precision="bf16", model=None, **overrides):
    """An engine on this rank's device, and its first samples there."""
    import penstock  # noqa: PLC0415 - the parent does without

    on_device.schedule(0)
    place = on_device.device()
    case = Case(strategy, precision, world=training.dist.get_world_size())
    model = training.moved(zoo.build("gpt"), place) if model is None else model
    engine = penstock.initialize(model, case.config() | overrides)
    batch = training.rank_part(zoo.batches("gpt", case.samples)[0], 0)
    return engine, training.sent(batch, place)


def train(engine, batch, steps=1):
    for _ in range(steps):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
    return loss.item()


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def edits_by_data(where):
    """A gathered parameter is written to through .data, which torch does not count."""
    engine, batch = start()
    train(engine, batch, 2)
    block = engine.module.blocks[0]

    def write(*_):
        next(block.parameters()).data.mul_(2)

    handle = block.norm1.register_forward_hook(write)
    if where == "evaluation":
        with torch.no_grad():
            told = raised(lambda: engine(*batch))
    else:
        told = raised(lambda: train(engine, batch))
    handle.remove()
    engine.close(gather=False)
    return told


def on_another_stream(strategy):
    """What a training forward and an evaluation on a side stream end in, and the loop goes on."""
    engine, batch = start(strategy)
    train(engine, batch)
    torch.accelerator.synchronize()
    side = torch.Stream(on_device.device())
    with side:
        told = raised(lambda: train(engine, batch))
        with torch.no_grad():
            evaluated = engine(*batch).item()
    torch.accelerator.synchronize()
    with torch.no_grad():
        assert engine(*batch).item() == evaluated
    train(engine, batch)
    engine.close()
    return told


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_forward_on_another_stream(strategy, device_pools):
    """A unit's memory would be freed in the order of the stream of initialize()."""
    for kind, text in device_pools(2).run(on_another_stream, strategy):
        if strategy == "zero3":
            assert kind == "RuntimeFault" and "Make one stream current" in text
        else:
            assert (kind, text) == (None, ""), text


def not_finite(strategy):
    engine, batch = start(strategy)
    train(engine, batch)
    parameter = engine.module.blocks[1].parameters().__next__()
    if training.dist.get_rank() == 1:
        parameter.register_hook(lambda gradient: gradient * float("nan"))
    told = raised(lambda: train(engine, batch))
    engine.close()
    return told


def whole_values():
    """gathered(write=True), full_grads(), state_dict(), and what close() leaves."""
    engine, batch = start()
    place = torch.device(on_device.device())
    train(engine, batch, 2)
    engine.backward(engine(*batch))
    assert all(one.device == place for one in engine.full_grads().values())
    engine.step()
    with engine.gathered(write=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)
    before = engine.state_dict()
    assert all(one.device.type == "cpu" for one in before.values())
    view = next(engine.module.parameters()).detach()
    engine.close()
    for name, parameter in engine.module.named_parameters():
        assert parameter.device == place
        if before:
            assert torch.allclose(parameter.float().cpu(), before[name].float(), rtol=1e-2), name
    assert torch.equal(view, next(engine.module.parameters()))
    return True


def saved(folder, device):
    """A checkpoint of the device loads on the CPU and the other way."""
    import penstock  # noqa: PLC0415

    engine, batch = start("zero3")
    train(engine, batch, 3)
    wait = device == "sim"
    engine.save(folder, wait=wait)
    after = train(engine, batch, 2)  # behind its back
    engine.wait_for_save() if hasattr(engine, "wait_for_save") else None
    engine.close()
    on_cpu = zoo.build("gpt")
    case = Case("zero2", "bf16", world=training.dist.get_world_size())
    other = penstock.initialize(on_cpu, case.config() | {"offload": {"optimizer": "host"}})
    other.load(folder)
    again = train(other, tuple(tensor.cpu() for tensor in batch), 2)
    other.close()
    return after, again


def pinning_fails():
    on_device.device()
    sim.set_pinning_fails(True)
    try:
        engine, batch = start("zero2", offload={"optimizer": "host"}, comm={"backend": "auto"})
        losses = [train(engine, batch) for _ in range(3)]
        engine.close()
    finally:
        sim.set_pinning_fails(False)
    engine, batch = start("zero2", offload={"optimizer": "host"})
    pinned = [train(engine, batch) for _ in range(3)]
    engine.close()
    return losses, pinned


def through_the_host():
    """gloo instead of the device's own collectives; fp32, so that sums have one order."""
    losses = []
    for back_end in ("gloo", "auto"):
        engine, batch = start("zero3", "fp32", comm={"backend": back_end})
        losses.append([train(engine, batch) for _ in range(3)])
        engine.close()
    return losses


def refused():
    import penstock  # noqa: PLC0415

    place = on_device.device()
    half = torch.nn.Sequential(torch.nn.Linear(4, 4, device=place), torch.nn.Linear(4, 4))
    meta = torch.nn.Linear(4, 4, device="meta")
    return [raised(lambda model=model: penstock.initialize(model, {})) for model in (half, meta)]


def two_devices():
    """Two engines of one process, on two devices, in turns."""
    import penstock  # noqa: PLC0415

    on_device.schedule(1)
    losses = []
    engines = []
    for index in (1, 3):
        place = f"{on_device.NAME}:{index}"
        model = training.moved(zoo.build("gpt"), place)
        engine = penstock.initialize(model, Case("zero2", "fp32").config())
        engines.append((engine, training.sent(zoo.batches("gpt", 2)[0], place)))
    for _ in range(3):
        losses.append([train(engine, batch) for engine, batch in engines])
    for engine, _ in engines:
        engine.close()
    return losses


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_an_edit_that_would_be_lost_is_told(where, device_pools):
    told = device_pools(2).run(edits_by_data, where)
    if where == "evaluation":  # whoever has that part of the parameter looks at it
        told = [one for one in told if one[0] is not None]
        assert told
    for kind, text in told:
        assert kind == "RuntimeFault", text
        assert "was changed in place" in text
        assert "gathered(write=True)" in text


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_is_not_finite_is_named(strategy, device_pools):
    for kind, text in device_pools(2).run(not_finite, strategy):
        assert kind == "RuntimeFault"
        assert "not finite" in text
        assert 'a parameter of "blocks.1", rank 1' in text


def test_whole_values(device_pools):
    assert device_pools(2).run(whole_values) == [True, True]


def test_checkpoints_cross(device_pools, tmp_path):
    for behind in ("sim", "behind"):
        for after, again in device_pools(2).run(saved, str(tmp_path / behind), behind):
            assert abs(after - again) < 2e-2


@pytest.mark.skipif(on_device.NAME != "sim", reason="only there can pinning be made to fail")
def test_memory_that_cannot_be_pinned(device_pools):
    for losses, pinned in device_pools(2).run(pinning_fails):
        assert losses == pinned


def test_collectives_through_the_host(device_pools):
    for gloo, own in device_pools(2).run(through_the_host):
        assert gloo == pytest.approx(own, rel=1e-6)


def test_models_that_are_nowhere_or_everywhere(device_pools):
    (half_kind, half), (meta_kind, meta) = device_pools(1).run(refused)[0]
    assert (half_kind, meta_kind) == ("ConfigError", "ConfigError")
    assert "an engine trains on one device per rank" in half
    assert "meta device" in meta


@pytest.mark.skipif(on_device.NAME != "sim", reason="there may be one device only")
def test_two_devices_in_a_process(device_pools):
    losses = device_pools(1).run(two_devices)[0]
    assert all(one == other for one, other in losses)


def resumed(folder):
    """Losses with dropout of a run, and of one that goes on from its checkpoint."""
    runs = []
    for first in (True, False):
        engine, batch = start("zero2", model=dropout_model())
        if first:
            train(engine, batch, 2)
            engine.save(folder)
        else:
            torch.rand(7, device=on_device.device())
            engine.load(folder)
        runs.append([train(engine, batch) for _ in range(3)])
        engine.close()
    return runs


def dropout_model():
    place = on_device.device()
    model = zoo.build("gpt")
    for layer in model.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.register_forward_hook(lambda *given: torch.nn.functional.dropout(given[2], 0.2))
    return training.moved(model, place)


def test_a_checkpoint_has_the_generator_of_the_device(device_pools, tmp_path):
    for before, after in device_pools(2).run(resumed, str(tmp_path)):
        assert before == after


def beside_a_device():
    """A model on the CPU trains there, with a warning."""
    import penstock  # noqa: PLC0415

    place = on_device.device()
    with pytest.warns(RuntimeWarning, match=f'initialize.device="{on_device.NAME}'):
        engine = penstock.initialize(zoo.build("gpt"), Case("zero2", "fp32").config())
    assert next(engine.module.parameters()).device.type != torch.device(place).type
    engine.close()


def test_a_model_beside_the_device_is_told(device_pools):
    device_pools(1).run(beside_a_device)


def on_another_device():
    import penstock  # noqa: PLC0415

    place = on_device.device()
    with torch.device(f"{on_device.NAME}:1"), penstock.init(device=place):
        return raised(lambda: torch.nn.Linear(4, 4))


@pytest.mark.skipif(on_device.count() < 2, reason="there is one device only")
def test_a_model_on_another_device_is_refused(device_pools):
    ((kind, text),) = device_pools(1).run(on_another_device)
    assert kind == "ConfigError" and f"is made on {on_device.NAME}" in text, text


def on_other_kinds():
    """One rank forgot to move its model."""
    model = zoo.build("gpt")
    if training.dist.get_rank() == 0:
        on_device.schedule(0)
        model = training.moved(model, on_device.device())
    import penstock  # noqa: PLC0415

    config = Case("zero2", "fp32", world=2).config() | {"comm": {"backend": "gloo"}}
    return raised(lambda: penstock.initialize(model, config))


def test_ranks_on_other_kinds_of_device_are_refused(device_pools):
    for kind, text in device_pools(2).run(on_other_kinds):
        assert kind == "RuntimeFault" and "parameters on" in text, text


def contexts(strategy, offload, folder):
    """Trains, saves in the background and closes on a rank that did not set its device."""
    import penstock  # noqa: PLC0415

    place = on_device.device()
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize(place)
    sim.forget_contexts()
    model = training.moved(zoo.build("gpt"), place)

    config = Case(strategy, "bf16", world=2).config() | {"offload": offload}
    engine = penstock.initialize(model, config)
    batch = training.rank_part(zoo.batches("gpt", 4)[0], 0)
    train(engine, training.sent(batch, place), 3)
    engine.save(folder, wait=False)
    train(engine, training.sent(batch, place), 1)
    engine.close()
    return torch.device(place).index, sim.contexts()


@pytest.mark.skipif(on_device.NAME != "sim", reason="only the simulated device counts")
@pytest.mark.parametrize("offload", [{}, {"optimizer": "host", "params": "host"}], ids=str)
def test_a_rank_has_no_context_on_other_devices(offload, device_pools, tmp_path):
    for index, made in device_pools(2).run(contexts, "zero3", offload, str(tmp_path)):
        assert made == [index]


def device_fails(strategy, offload):
    """A kernel fails: an index is out of range, which the device finds when it gets there."""
    engine, batch = start(strategy, offload=offload)
    train(engine, batch, 2)
    bad = tuple(tensor + 10**6 if tensor.dtype == torch.int64 else tensor for tensor in batch)
    told = raised(lambda: train(engine, bad, 2))
    closed = raised(engine.close)
    sim.reset_errors()
    again, batch = start("zero2")
    loss = train(again, batch, 2)
    again.close()
    return told, closed, loss


@pytest.mark.skipif(on_device.NAME != "sim", reason="a device that failed stays so")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        ("zero3", {}),
        ("zero2", {"optimizer": "host"}),
        ("zero3", {"params": "host", "optimizer": "host"}),
    ],
    ids=str,
)
def test_a_device_that_fails_is_an_error(world, strategy, offload, device_pools):
    for (kind, text), (_, closed), loss in device_pools(world).run(device_fails, strategy, offload):
        assert kind is not None and "sim" in text, text
        assert "sim" in closed or not closed, closed
        assert loss == loss
