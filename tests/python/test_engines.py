"""Engines made and closed, several in one process, and one without any group."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib

import models
import psutil
import pytest
import torch
import torch.distributed as dist
import training
from test_api import assert_same, batches, every_strategy, initialize, plain_adamw, start
from torch import nn
from training import Case


class Wide(nn.Module):
    """24 MB of weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def create_and_close(strategy):
    process = psutil.Process()
    used = []
    for _ in range(5):
        model = Wide()
        engine = initialize(model, {"strategy": strategy, "precision": "bf16"})
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 1000, dtype=torch.bfloat16)))
            engine.step()
        engine.close()
        del engine, model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is no leak
        used.append((process.memory_info().rss >> 20, process.num_threads(), process.num_fds()))
    return used


@every_strategy
def test_create_and_close_five_times(strategy, pools):
    for used in pools(2).run(create_and_close, strategy):
        (first_mb, first_threads, first_fds), (last_mb, last_threads, last_fds) = used[1], used[-1]
        assert last_mb - first_mb < 24, f"resident MB, threads, files: {used}"
        assert last_threads <= first_threads, f"resident MB, threads, files: {used}"
        assert last_fds <= first_fds, f"resident MB, threads, files: {used}"


def two_engines():
    first, second = start("zero3"), start("zero1")
    for batch in batches():
        for engine in (first, second):
            engine.backward(engine(*training.rank_part(batch, 0)))
        for engine in (first, second):
            engine.step()
    weights = first.state_dict(), second.state_dict()
    first.close()
    second.close()
    return weights


def test_two_engines_in_one_process(pools):
    zero3, zero1 = pools(2).run(two_engines)[0]
    theirs = plain_adamw([[batch] for batch in batches()])
    assert_same(zero3, theirs)
    assert_same(zero1, theirs)


def test_one_process_without_a_group():
    model = models.build("gpt")
    engine = initialize(model, Case("zero3").config())
    for batch in batches():
        engine.backward(engine(*batch))
        engine.step()
    weights = engine.state_dict()
    engine.close()
    assert not dist.is_initialized()
    assert_same(weights, plain_adamw([[batch] for batch in batches()]))


def give_back(how):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrong = {
        "two schedules": {"schedule": {"type": "constant"}},
        "no such folder": {"offload": {"optimizer": "disk", "path": "/nowhere/at/all"}},
    }[how]
    with pytest.raises(penstock.ConfigError):
        penstock.initialize(model, wrong, optimizer=optimizer, lr_scheduler=schedule)
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name


@pytest.mark.parametrize("how", ["two schedules", "no such folder"])
def test_a_refused_model_is_whole_again(how, pools):
    pools(2).run(give_back, how)


class Raises(torch.optim.SGD):
    """Raises when it is told to."""

    armed = False

    def step(self, closure=None):
        if type(self).armed:
            raise ValueError("no step today")
        return super().step(closure)


def step_after_an_error(strategy):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = penstock.initialize(
        model, {"strategy": strategy}, optimizer=lambda params: Raises(params, lr=0.0)
    )
    norms = []
    for step in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        Raises.armed = step == 1
        if Raises.armed:
            with pytest.raises(ValueError, match="no step today"):
                engine.step()
        else:
            engine.step()
            norms.append(engine.grad_norm)
    assert norms[0] == norms[1], "the failed step's gradients were added"
    engine.close()


@every_strategy
def test_an_optimizer_that_raises_leaves_no_gradients(strategy, pools):
    pools(2).run(step_after_an_error, strategy)


def swap_files(folder):
    descriptors = pathlib.Path("/proc/self/fd")
    return [d for d in descriptors.iterdir() if os.path.realpath(d).startswith(folder)]


def open_and_close_disk(folder):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    offload = {"optimizer": "disk", "params": "disk", "path": folder, "checksums": True}
    engine = penstock.initialize(model, {"strategy": "zero3", "offload": offload})
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    assert swap_files(folder)
    engine.close()
    assert not swap_files(folder), "close() keeps the swap file open"


def test_close_gives_the_disk_back(pools, tmp_path):
    pools(2).run(open_and_close_disk, str(tmp_path))


def close_without_gathering(strategy, offload):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = penstock.initialize(model, {"strategy": strategy, "offload": offload})
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    if dist.get_rank() == 1:  # one after the other: no peer is needed
        dist.barrier()
    engine.close(gather=False)
    if dist.get_rank() == 0:
        dist.barrier()
    try:
        model[0].weight.sum()
    except RuntimeError as error:
        return str(error)
    return "values"


def read_a_closed_engine(strategy, gather):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = penstock.initialize(model, {"strategy": strategy})
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    grads = engine.full_grads()
    engine.close(gather)
    engine.close(gather)  # has nothing to do
    said = []
    for call in (
        lambda: engine(torch.ones(2, 4)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.state_dict,
        engine.full_grads,
        lambda: engine.set_grads(grads),
        lambda: engine.gathered().__enter__(),
    ):
        try:
            call()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("gather", [True, False])
@every_strategy
def test_a_closed_engine_says_so(strategy, gather, pools):
    for said in pools(2).run(read_a_closed_engine, strategy, gather):
        assert [text for text in said if "the engine is closed" not in text] == []


def overflow_beside_reads(folder):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    config = {"precision": "fp16", "units": {"modules": ["Linear"]}}
    config |= {"offload": {"optimizer": "disk", "path": folder}}
    engine = penstock.initialize(model, config | {"loss_scale": {"initial": 2.0**30}})
    skipped = 0
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 64, dtype=torch.float16)).float().square().mean())
        skipped += not engine.step()
    ledger = engine.ledger()
    engine.close()
    return skipped, ledger["measured"]["host"] / ledger["predicted"]["zero3"]["host"]


def test_a_skipped_step_keeps_nothing_that_was_read_for_it(pools, tmp_path):
    for skipped, ratio in pools(2).run(overflow_beside_reads, str(tmp_path)):
        assert skipped > 0
        assert ratio <= 1.1


SHARDED = [("zero3", {}), ("zero3", {"optimizer": "disk", "params": "disk"}), ("ddp", {})]


@pytest.mark.parametrize(("strategy", "offload"), SHARDED, ids=str)
def test_what_is_larger_than_memory_closes_without_gathering(strategy, offload, pools, tmp_path):
    if offload:
        offload = offload | {"path": str(tmp_path)}
    for said in pools(2).run(close_without_gathering, strategy, offload):
        if strategy == "ddp":
            assert said == "values"
        else:
            assert 'parameter "0.weight" has no values' in said and "without gathering" in said


# ---- what the user keeps beyond the engine


def kept_beyond(strategy, how, config):
    """What views say that were made before training, and whether they are the parameters still."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
    engine = penstock.initialize(
        model, {"strategy": strategy, "units": {"modules": ["Linear"]}, **config}
    )
    weight = model[1].weight
    kept = [model.state_dict()["1.weight"], weight.detach(), weight.data, weight.t()]
    engine.backward(engine(torch.ones(2, 512)).square().mean())
    engine.step()
    expected = engine.state_dict().get("1.weight")
    if how == "gathered":
        engine.close()
    elif how == "dropped":
        engine.close(gather=False)
    else:  # the model's hooks hold the engine's inside, so both end
        del engine, model, weight
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    said = []
    for view in kept:
        try:
            said.append(view.clone() if view.is_contiguous() else view.detach().t().clone())
        except RuntimeError as error:
            said.append(str(error))
    if how == "gathered":
        with torch.no_grad():
            model[1].weight.fill_(3.0)
        assert all(bool((view == 3.0).all()) for view in kept), "views left their parameter"
        kept[0].untyped_storage().resize_(0)
        assert weight.untyped_storage().nbytes() == 0
    return expected, said


ENDS = ["gathered", "dropped", "deleted"]
KEPT = [("zero3", {}), ("zero2", {}), ("ddp", {}), ("zero3", {"tiling": {"max_bytes": 300_000}})]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(("strategy", "config"), KEPT, ids=str)
def test_views_outlive_the_engine(strategy, config, how, pools):
    outcomes = pools(2).run(kept_beyond, strategy, how, config)
    expected = outcomes[0][0]
    for _, said in outcomes:
        for value in said:
            if strategy == "zero3" and how != "gathered":
                assert '1.weight" has no values' in value
            else:
                assert value.equal(expected)


def results_beyond(strategy):
    engine = start(strategy)
    batch = training.rank_part(batches()[0], 0)
    engine.backward(engine(*batch))
    weights, gradients = engine.state_dict(), engine.full_grads()
    copies = [{n: t.clone() for n, t in part.items()} for part in (weights, gradients)]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    for _ in range(2):
        engine.step()
        engine.backward(engine(*batch))
    engine.close()
    for ours, before in zip((weights, gradients), copies, strict=True):
        assert all(ours[name].equal(before[name]) for name in ours)
    return len(weights), len(pointers)


@every_strategy
def test_results_are_copies(strategy, pools):
    names, memories = pools(2).run(results_beyond, strategy)[0]
    assert memories == names - 1, "tensors share memory that are not tied"


def shards_beyond(how):
    import penstock  # noqa: PLC0415

    class Keeps(torch.optim.RMSprop):
        def step(self, closure=None):
            if self in armed:  # not the copy on which steps are tried first
                kept.extend(p.grad for group in self.param_groups for p in group["params"])
                if how == "raises":
                    raise ValueError("no step today")
            return super().step(closure)

    kept, armed = [], []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    engine = penstock.initialize(
        model, {"strategy": "zero3"}, optimizer=lambda params: Keeps(params, lr=0.01)
    )
    optimizer = engine.optimizer
    armed.append(optimizer)
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    if how == "raises":
        with pytest.raises(ValueError, match="no step today"):
            engine.step()
    else:
        engine.step()
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    for master in masters:
        if master.numel() > 0:
            with pytest.raises(RuntimeError, match="outside step"):
                master.isfinite()
    engine.close()
    said = []
    for tensor in [*masters, *(gradient for gradient in kept if gradient is not None)]:
        if tensor.numel() > 0:
            try:
                said.append(float(tensor.sum()))
            except RuntimeError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["steps", "raises"])
def test_an_optimizers_shards_never_dangle(how, pools):
    for said in pools(2).run(shards_beyond, how):
        assert said
        assert [text for text in said if "belonged to" not in str(text)] == []
