"""What a rank runs for test_drop_in_devices.py: calls of `deepspeed` on a simulated device."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist


@contextlib.contextmanager
def drop_in(**env: str) -> Iterator[Any]:
    """In this context `import deepspeed` finds ours, and the environment has these variables."""
    import penstock.deepspeed  # noqa: PLC0415

    on_device.schedule(1)
    penstock.deepspeed.install()
    import deepspeed  # noqa: PLC0415
    from deepspeed.accelerator import real_accelerator  # noqa: PLC0415

    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank()), **env}):
        real_accelerator.set_accelerator(None)
        yield deepspeed
    real_accelerator.set_accelerator(None)


# Expressions that are true on rank r; `a` is the accelerator, `t` a tensor on the device.
ACCELERATOR = """
a._name == 'sim' and a.device_name() == 'sim' and a.device_name(3) == 'sim:3'
a.current_device() == r and a.current_device_name() == f'sim:{r}' and a.device_count() == 8
a.device(1) == torch.device('sim', 1) and a.on_accelerator(t) and not a.on_accelerator(t.cpu())
a.is_available() and not a.is_synchronized_device() and not a.use_host_timers()
not a.resolves_data_dependency() and not a.handles_memory_backpressure()
a.set_device(2) is None and a.current_device() == 2 and a.set_device(r) is None
a.set_device(f'sim:{r}') is None and a.current_device() == r
a.synchronize() is None and a.synchronize(0) is None
a.communication_backend_name() == 'simccl' and a.export_envs() == ['SIMCCL']
a.is_bf16_supported() and a.is_fp16_supported() and a.is_fp64_supported()
a.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
a.preferred_dtype() == torch.bfloat16 and not a.is_triton_supported()
a.FloatTensor([1, 2]).device == t.device and a.FloatTensor([1]).dtype == torch.float32
a.BFloat16Tensor([1]).dtype == torch.bfloat16 and a.HalfTensor([1]).dtype == torch.float16
a.LongTensor([1]).dtype == torch.long and a.IntTensor([1]).dtype == torch.int
a.ByteTensor([1]).dtype == torch.uint8 and a.DoubleTensor([1]).dtype == torch.double
a.memory_allocated() > 0 and a.max_memory_allocated() >= a.memory_allocated()
a.memory_reserved(r) >= a.memory_allocated(r) and a.max_memory_reserved() == a.max_memory_cached()
a.memory_cached() == a.memory_reserved() and 'allocated_bytes.all.peak' in a.memory_stats()
a.total_memory() >= a.available_memory() > 0 and a.empty_cache() is None
a.reset_peak_memory_stats() is None and a.max_memory_allocated() == a.memory_allocated()
a.reset_max_memory_allocated() is None and a.reset_max_memory_cached() is None
a.manual_seed(3) is not None and a.initial_seed() == 3 and a.manual_seed_all(4) is None
a.set_rng_state(a.get_rng_state()) is None and a.get_rng_state(1).numel() > 0
a.default_generator(r).initial_seed() == 4 and a.random() is torch.random
isinstance(a.Stream(), torch.Stream) and isinstance(a.Event(enable_timing=True), torch.Event)
a.stream(a.Stream()).__enter__() is not None and a.current_stream() is not None
a.default_stream(r).device.index == r and not a.is_current_stream_capturing()
a.pin_memory(torch.ones(3)).is_pinned() and a.is_pinned(a.pin_empty(2, 3, dtype=torch.half))
a.pin_empty_like(t).device.type == 'cpu' and a.pin_empty_like(t).shape == t.shape
a.pin_memory(torch.ones(2, 3), make_copy=False, match_shape=False).shape == (6,)
a.range_push('x') is None and a.range_pop() is None and a.lazy_call(lambda: 5) == 5
a.get_op_builder('CPUAdamBuilder')().is_compatible() and a.create_op_builder('None') is None
not a.create_op_builder('QuantizerBuilder').is_compatible()
a.visible_devices_envs() == ['SIM_VISIBLE_DEVICES'] and a.get_compile_backend() == 'inductor'
'pin_memory' in dir(a) and hasattr(a, 'memory_stats') and not hasattr(a, 'no_such_call')
isinstance(a, ds.accelerator.abstract_accelerator.DeepSpeedAccelerator)
"""


def accelerator() -> list[str]:
    """The expressions that are not true."""
    wrong = []
    with drop_in() as ds:
        names = {"a": ds.get_accelerator(), "ds": ds, "torch": torch, "r": dist.get_rank()}
        with torch.sim.stream(torch.sim.default_stream()):  # an expression leaves a stream open
            names["t"] = torch.ones(3, device=on_device.device())
            for one in ACCELERATOR.strip().splitlines():
                try:
                    right = eval(one, names)
                except Exception as error:  # noqa: BLE001 - is told
                    right, one = False, f"{one}: {type(error).__name__}: {error}"
                if not right:
                    wrong.append(one)
        with pytest.raises(ds.DeepSpeedConfigError.__mro__[1], match="create_graph|CUDAGraph"):
            names["a"].create_graph()
    return wrong


def chosen() -> None:
    """DS_ACCELERATOR chooses among the CPU and what the machine has."""
    for wanted, found in (("", "sim"), ("sim", "sim"), ("cpu", "cpu")):
        with drop_in(DS_ACCELERATOR=wanted) as ds:
            assert ds.get_accelerator().device_name() == found
            model = torch.nn.Linear(3, 3)
            engine, *_ = ds.initialize(model=model, config=_config())
            assert engine.device.type == model.weight.device.type == found
            assert found == "cpu" or engine.device.index == dist.get_rank()
            engine.destroy()
            back_end = "gloo" if found == "cpu" else "cpu:gloo,sim:simccl"
            for asked in (None, "nccl", "ccl"):
                assert ds.comm.comm._back_ends(asked) == back_end
            assert ds.comm.comm._back_ends("gloo") == "gloo"
    with drop_in(DS_ACCELERATOR="cuda") as ds:
        wanted = 'DS_ACCELERATOR is "cuda", but this machine has "sim". Unset the variable'
        with pytest.raises(ValueError, match=re.escape(wanted)):
            ds.initialize(model=torch.nn.Linear(3, 3), config=_config())
    with drop_in() as ds, pytest.raises(ValueError, match="set_accelerator.*is a str"):
        ds.accelerator.set_accelerator("cuda")


def _config(**more: Any) -> dict[str, Any]:
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    return base | more


def refused() -> None:
    """Layers that cut themselves draw from generators and make collectives of their own."""
    with drop_in() as ds:
        topology = ds.runtime.pipe.topology.PipeModelDataParallelTopology(1, 2, 1)
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        model = ds.PipelineModule(layers=layers, topology=topology, loss_fn=torch.sum)
        text = "2 tensor ranks.*cannot train on a device yet.*Set DS_ACCELERATOR=cpu"
        with pytest.raises(ValueError, match=text):
            ds.initialize(model=model, config=_config(train_batch_size=2))


def collectives() -> None:
    """On device and host tensors, in the group that init_distributed() would make."""
    with drop_in() as ds:
        comm, rank, place = ds.comm, dist.get_rank(), on_device.device()
        group = dist.new_group(backend=comm.comm._back_ends("nccl"))
        for where in (place, "cpu"):
            own = torch.full((2,), rank + 1.0, device=where)
            total = own.clone()
            comm.all_reduce(total, group=group)
            assert total.tolist() == [3.0, 3.0]
            whole = torch.empty(4, device=where)
            comm.all_gather_into_tensor(whole, own, group=group)
            assert whole.tolist() == [1.0, 1.0, 2.0, 2.0]
            part = torch.empty(2, device=where)
            comm.reduce_scatter_tensor(part, whole, group=group)
            assert part.tolist() == [2.0 * (rank + 1)] * 2
            comm.broadcast(own, 1, group=group)
            assert own.tolist() == [2.0, 2.0]
        comm.barrier(group)
        dist.destroy_process_group(group)


def parameters(stage: int, built: bool) -> None:
    """zero.Init, GatheredParameters and safe_* with a group that exchanges host memory only, as the
    pool's."""
    with drop_in() as ds:
        torch.manual_seed(0)
        expected = torch.nn.Linear(4, 4)
        torch.manual_seed(0)
        config = _config(zero_optimization={"stage": stage})
        with ds.zero.Init(enabled=built, config_dict_or_path=config):
            model = torch.nn.Linear(4, 4)
        if built:
            with ds.zero.GatheredParameters([model.bias], modifier_rank=0):
                if dist.get_rank() == 0:
                    model.bias.data.fill_(2.0)
        else:
            model.bias.data.fill_(2.0)
        engine, *_ = ds.initialize(model=model, config=config)
        assert engine.device == model.weight.device == torch.device(on_device.device())
        with ds.zero.GatheredParameters([model.weight], modifier_rank=1):
            assert model.weight.detach().cpu().equal(expected.weight.detach())
            if dist.get_rank() == 1:
                model.weight.data.mul_(2)
        with ds.zero.GatheredParameters([model.weight, model.bias]):
            assert model.weight.detach().cpu().equal(2 * expected.weight.detach())
            assert model.bias.tolist() == [2.0] * 4
        engine.backward(engine(torch.ones(2, 4, device=engine.device)).sum())
        gradient = ds.utils.safe_get_full_grad(model.weight)
        assert gradient.cpu().equal(torch.full((4, 4), 2.0))
        ds.utils.safe_set_local_grad(model.weight, ds.utils.safe_get_local_grad(model.weight) / 2)
        assert ds.utils.safe_get_full_grad(model.weight).cpu().equal(torch.ones(4, 4))
        engine.step()
        model.cpu()
        engine.destroy()


def loader() -> None:
    """Batches of training_data are pinned and on the host, as DeepSpeed's."""
    with drop_in() as ds:
        data = [torch.full((4,), float(i)) for i in range(8)]
        engine, _, batches, _ = ds.initialize(
            model=torch.nn.Linear(4, 4), config=_config(), training_data=data
        )
        batch = next(iter(batches))
        assert batch.is_pinned() and batch.device.type == "cpu"
        ds.runtime.utils.see_memory_usage("after a batch", force=True)
        engine.destroy()
