"""Inputs of recomputed layers on the host, collectives of several tensors, writes to open files."""

from __future__ import annotations

import math
import os
import pathlib

import offloaded_inputs
import pytest
import torch
import torch.distributed as dist
from pipe_models import deepspeed


def test_nothing_moves_on_a_cpu(drop_in_pools):
    (found,) = drop_in_pools(1).run(offloaded_inputs.counts, "cpu", 0, True)
    layers = offloaded_inputs.LAYERS
    assert (found["marked_tensors"], found["skipped_marked_tensors"]) == (layers, layers)
    assert found["offloaded_tensors"] == found["restored_tensors"] == found["offloaded_bytes"] == 0
    assert found["saved_tensors_seen"] > layers


def refused():
    deepspeed()
    from deepspeed.runtime.activation_checkpointing import (  # noqa: PLC0415
        offload_activations as tested,
    )

    with pytest.raises(ValueError, match="keep_last_count must be at least 0, not -1"):
        tested.CheckpointHiddenStatesOffload(keep_last_count=-1)
    outer, inner = (tested.CheckpointHiddenStatesOffload() for _ in range(2))
    with outer, inner, pytest.raises(RuntimeError, match="is not re-entrant"):
        outer.__enter__()


def test_wrong_uses_are_refused(drop_in_pools):
    drop_in_pools(1).run(refused)


def averaged(sizes, dtype):
    """On a rank: whether each part is that of the mean, and the tensors keep their values."""
    deepspeed()
    from deepspeed.runtime.comm import coalesced_collectives  # noqa: PLC0415

    rank, world = dist.get_rank(), dist.get_world_size()
    given = [(rank + 1.0) * torch.arange(math.prod(size)).reshape(size).to(dtype) for size in sizes]
    before = [one.clone() for one in given]
    parts = coalesced_collectives.reduce_scatter_coalesced(given, dist.group.WORLD)
    assert all(map(torch.equal, given, before))
    for size, part in zip(sizes, parts, strict=True):
        mean = (world + 1) / 2 * torch.arange(math.prod(size))
        chunk = -(-math.prod(size) // world)
        wanted = mean[rank * chunk : (rank + 1) * chunk]
        torch.testing.assert_close(part.double(), wanted.double(), rtol=1e-3, atol=0)
        assert part.dtype == dtype
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reduce_scatter_of_several_tensors(world, dtype, drop_in_pools):
    for sizes in [((6,),), ((6,), (3,)), ((1,),), ((2, 5), (0,), (7,), (1, 1, 1))]:
        assert all(drop_in_pools(world).run(averaged, sizes, dtype))


def written(folder):
    """Writes pages to a file that was opened for direct access, and through its name."""
    ds = deepspeed()
    handle = ds.ops.op_builder.AsyncIOBuilder().load().aio_handle(intra_op_parallelism=2)
    page = os.sysconf("SC_PAGE_SIZE")
    pages = handle.new_cpu_locked_tensor(3 * page, torch.empty(0, dtype=torch.uint8))
    assert pages.data_ptr() % page == 0
    pages.copy_(torch.arange(3 * page) % 251)
    path = pathlib.Path(folder) / "pages"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    assert handle.async_pwrite(buffer=pages[page:], fd=descriptor, file_offset=page) == 0
    assert handle.wait() == 1
    os.close(descriptor)  # the handle has left it open
    assert handle.async_pwrite(pages[:page], path) == 0
    assert handle.wait() == 1
    assert path.read_bytes() == bytes(pages.tolist())
    for both in ({}, {"filename": str(path), "fd": 1}):
        with pytest.raises(TypeError, match="either filename or fd"):
            handle.async_pwrite(pages, **both)
    assert handle.new_cpu_locked_tensor(0, pages).numel() == 0


def test_open_files_are_written(drop_in_pools, tmp_path):
    drop_in_pools(1).run(written, str(tmp_path))
