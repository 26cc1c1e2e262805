"""The loops of tests/drop_in/rlhf_loops.py as scenarios of deepspeed_scenarios.py."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "drop_in"))

import rlhf_cases  # noqa: E402


def _run(name: str, deepspeed: Any, rank: int, world: int) -> list[float]:
    import rlhf_loops  # noqa: PLC0415 - after deepspeed
    import rlhf_models  # noqa: PLC0415

    place = pathlib.Path.cwd()  # the ranks share it
    if rank == 0:
        rlhf_models.write_models(place)
    dist.barrier()
    loop, options = rlhf_cases.CASES[name]
    found: list[float] = getattr(rlhf_loops, loop)(deepspeed, place, **options)
    return found


SCENARIOS = {name: functools.partial(_run, name) for name in rlhf_cases.CASES}
_AVERAGE = (
    "DeepSpeed drops what a script writes inside GatheredParameters without modifier_rank, so the "
    "moving average of the weights stays as it was"
)
DIFFERS = {
    name: _AVERAGE
    for name in (
        *("chat-ppo-zero3", "chat-ppo-zero3-offload"),
        *("open-rlhf-zero3", "open-rlhf-zero3-offload"),
    )
}
