"""Loops of RLHF projects with several engines: as in plain torch on the same ranks."""

from __future__ import annotations

import pathlib

import pipe_models as pipes
import pytest
import rlhf_cases
import torch
import torch.distributed as dist


def both(name: str, folder: str) -> tuple[list[float], list[float]]:
    """On a rank: the results of plain torch and of the drop-in."""
    ds = pipes.deepspeed()
    import plain_deepspeed  # noqa: PLC0415 - transformers is imported after the drop-in
    import rlhf_loops  # noqa: PLC0415
    import rlhf_models  # noqa: PLC0415

    place = pathlib.Path(folder)
    if dist.get_rank() == 0 and not (place / "base").exists():
        rlhf_models.write_models(place)
    dist.barrier()
    loop, options = rlhf_cases.CASES[name]
    found = []
    for package in (plain_deepspeed, ds):
        torch.manual_seed(0)
        found.append(getattr(rlhf_loops, loop)(package, place, **options))
    return found[0], found[1]


def pytest_generate_tests(metafunc):
    if "loop" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("loop", list(rlhf_cases.CASES) if full else rlhf_cases.SAMPLE)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


def test_as_plain(loop, models, drop_in_pools):
    for plain, ours in drop_in_pools(2).run(both, loop, models):
        assert ours == pytest.approx(plain, abs=1e-5, rel=1e-5)
