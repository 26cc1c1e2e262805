"""ResumableLoader: every sample once an epoch, from where the checkpoint was, on any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

LENGTH, BATCH = 50, 4


def loader_of(**options):
    import penstock  # noqa: PLC0415

    data = TensorDataset(torch.arange(LENGTH))
    return penstock.ResumableLoader(data, options.pop("batch", BATCH), **options)


def epochs(count, workers):
    loader, seen = loader_of(seed=3, num_workers=workers), []
    while loader.epoch < count:
        seen.append([batch[0].tolist() for batch in loader])
        assert len(seen[-1]) == len(loader)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_every_epoch(workers, pools):
    first, second = pools(2).run(epochs, 2, workers)
    for ours, theirs in zip(first, second, strict=True):
        samples = sum(ours + theirs, [])
        assert len(samples) == len(set(samples)) == LENGTH // (2 * BATCH) * 2 * BATCH
    assert first[0] != first[1]


def stop_in_the_middle(folder, workers):
    """The samples of the first batches; then a save."""
    import penstock  # noqa: PLC0415

    loader = loader_of(seed=3, num_workers=workers)
    engine = penstock.initialize(nn.Linear(1, 1), {})
    engine.register_for_checkpointing(loader)
    seen = []
    for i, (batch,) in enumerate(loader):
        seen += batch.tolist()
        engine.backward(engine(batch[:, None].float()).square().mean())
        engine.step()
        if i == 2:
            engine.save(folder, wait=False)
            break
    engine.close()
    return seen


def go_on(folder, batch):
    import penstock  # noqa: PLC0415

    loader = loader_of(seed=3, batch=batch)
    engine = penstock.initialize(nn.Linear(1, 1), {})
    engine.register_for_checkpointing(loader)
    engine.load(folder)
    seen = [item for (one,) in loader for item in one.tolist()]
    assert loader.epoch == 1
    engine.close()
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_sample_is_lost_or_seen_twice(world, workers, pools, tmp_path):
    before = sum(pools(2).run(stop_in_the_middle, str(tmp_path), workers), [])
    after = sum(pools(world).run(go_on, str(tmp_path), 2), [])
    assert len(before) == 3 * 2 * BATCH
    assert len(set(before + after)) == len(before + after)
    assert len(before + after) > LENGTH - 2 * world
    (whole,) = pools(1).run(one_epoch)
    assert sorted(before) == sorted(whole[: len(before)])  # the same order of the epoch


def one_epoch():
    return [item for (one,) in loader_of(seed=3, batch=2) for item in one.tolist()]


def refusals():
    import penstock  # noqa: PLC0415

    with pytest.raises(penstock.ConfigError, match="sampler is not allowed"):
        loader_of(sampler=[1, 2])
    with pytest.raises(penstock.ConfigError, match="less than one batch of 100"):
        loader_of(batch=100)
    with pytest.raises(penstock.ConfigError, match="seed is 1 here and 3 in the checkpoint"):
        loader_of(seed=1).load_state_dict(loader_of(seed=3).state_dict())
    assert dist.get_world_size() == 1


def test_refusals(pools):
    pools(1).run(refusals)
