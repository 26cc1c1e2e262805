"""A disk that is too full, for the claim and later: an error on all ranks, and nothing left.

The largest size of a file (RLIMIT_FSIZE) stands for the disk; Python ignores its signal.
"""

from __future__ import annotations

import os
import pathlib
import re
import resource

import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from torch import nn

WORLD, TIMEOUT_S, SLACK_S = 2, 12, 20
FULL_FROM = 3  # step
CASES = {
    # When, on which ranks, and what the error of a rank says whose disk is full.
    "claim, rank 1": (0, (1,), r"cannot hold a swap file of .* \(.* free\): File too large"),
    "claim, all": (0, (0, 1), r"cannot hold a swap file of .* \(.* free\): File too large"),
    "later, rank 1": (FULL_FROM, (1,), r"write of \d+ bytes at offset \d+ .*File too large"),
    "later, all": (FULL_FROM, (0, 1), r"write of \d+ bytes at offset \d+ .*File too large"),
}


def held(folder):
    """Descriptors of this process that are files in the folder, with a name or without."""
    return [d for d in os.scandir("/proc/self/fd") if os.path.realpath(d.path).startswith(folder)]


def fill_up(when, ranks, folder):
    import penstock  # noqa: PLC0415

    def fill():
        if dist.get_rank() in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    offload = {"optimizer": "disk", "params": "disk", "path": folder}
    engine = None
    try:
        if when == 0:
            fill()
        engine = penstock.initialize(model, {"offload": offload, "comm": {"timeout_s": TIMEOUT_S}})
        for step in range(1, FULL_FROM + 3):
            if step == when:
                fill()
            engine.backward(engine(torch.ones(2, 256)).square().mean())
            engine.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if engine is not None:
            engine.close()
        assert not held(folder), "the swap file is still open"


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_ends_all_ranks(name, pools, tmp_path):
    when, ranks, says = CASES[name]
    outcomes = pools(WORLD).attempt(
        fill_up, when, ranks, str(tmp_path), timeout=TIMEOUT_S + SLACK_S
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Failure), f"rank {rank} went on: {outcome}"
        assert outcome.is_a("RuntimeFault"), outcome.trace
        if rank in ranks:
            assert re.search(says, outcome.text), f"rank {rank}: {outcome.text}"
            assert str(tmp_path) in outcome.text, f"rank {rank}: {outcome.text}"
        else:
            others = rf"rank 1 failed with: .*{says}" if when == 0 else r"rank 1 is at "
            assert re.search(others, outcome.text), f"rank {rank}: {outcome.text}"
    assert not list(pathlib.Path(tmp_path).iterdir()), "a swap file was left"


def build_again_elsewhere(full, free):
    import gc  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with penstock.init(path=full):
            nn.Linear(256, 256)
    except RuntimeError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()
    with penstock.init(path=free):
        model = nn.Linear(256, 1)
    engine = penstock.initialize(model, {"comm": {"timeout_s": TIMEOUT_S}})
    engine.backward(engine(torch.ones(2, 256)).square().mean())
    engine.step()
    engine.close()
    assert not held(full) and not held(free)
    return said


def test_a_model_that_found_the_disk_full_can_be_built_elsewhere(pools, tmp_path):
    for name in ("full", "free"):
        (tmp_path / name).mkdir()
    for said in pools(WORLD).run(
        build_again_elsewhere, str(tmp_path / "full"), str(tmp_path / "free")
    ):
        assert "cannot hold a swap file" in said
