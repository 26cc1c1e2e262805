"""Accumulation windows that the script decides, case by case, beside one process of plain torch.

Started on each rank; see reporting.py. A case trains with windows of 1, 3 and 2 micro-batches and
says how far the weights are from those of one process, and what calls raised.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from raised import raised
from reporting import report

SIZES = (1, 3, 2)
WIDTH = 6
CASES = (
    "unmanaged",
    "unmanaged-plain-backward",
    "unmanaged-undivided",
    "boundary-one-step",
    "boundary-step-each",
    "boundary-plain-backward",
    "no_sync",
    "no_sync-plain-backward",
    "coalesce",
)
NAMES = [f"{case}-stage{stage}" for stage, case in itertools.product(range(4), CASES)]


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    )


def _input(window: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * window + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator)


def _plain(divided: bool) -> torch.nn.Module:
    """One process with the micro-batches of all ranks; `divided`: by the size of the window."""
    model, world = _net(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window, size in enumerate(SIZES):
        for micro, rank in itertools.product(range(size), range(world)):
            loss = model(_input(window, micro, rank)).square().mean()
            (loss / world / (size if divided else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _tried(engine: Any, block: Callable[[], Any], said: dict[str, str]) -> None:
    """Enters a block and makes the calls that are refused inside it."""
    with block():
        said["step"] = raised(engine.step)
        said["again"] = raised(lambda: _tried(engine, block, {}))


def _engine(case: str, stage: int, overlaps: bool = False) -> Any:
    import deepspeed  # noqa: PLC0415 - the tests that import this module do without

    model = _net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if case.startswith("unmanaged") else 1,
        "zero_optimization": {"stage": stage, "overlap_comm": overlaps},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "managed_gradient_accumulation": not case.startswith("unmanaged"),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _backward(engine: Any, case: str, loss: torch.Tensor) -> None:
    if "plain-backward" in case:
        # The engine divides it by gradient_accumulation_steps, as DeepSpeed does.
        (loss * engine.gradient_accumulation_steps()).backward()
    else:
        engine.backward(loss, scale_wrt_gas=False)


def _context(engine: Any, case: str, is_last: bool) -> contextlib.AbstractContextManager[None]:
    if case.startswith("no_sync") and not is_last:
        return engine.no_sync()
    return contextlib.nullcontext()


def _window(engine: Any, case: str, window: int, size: int) -> list[bool]:
    """Trains one window; returns is_gradient_accumulation_boundary() before each backward."""
    boundaries = []
    for micro in range(size):
        is_last = micro == size - 1
        if case.startswith("boundary"):
            engine.set_gradient_accumulation_boundary(is_last)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        with _context(engine, case, is_last):
            loss = engine(_input(window, micro, dist.get_rank())).square().mean()
            _backward(engine, case, loss if case == "unmanaged-undivided" else loss / size)
        if case == "boundary-step-each" and not is_last:
            engine.step()
    return boundaries


def run(name: str) -> dict[str, Any]:
    case, _, stage = name.rpartition("-stage")
    engine = _engine(case, int(stage))
    start = copy.deepcopy(_net())
    said: dict[str, str] = {}
    block = engine.no_sync if case.startswith("no_sync") else engine.coalesce_grad_reduction
    if case.startswith(("no_sync", "coalesce")):
        said["enter"] = raised(lambda: _tried(engine, block, said))
        if said["enter"]:
            engine.destroy()
            return {"said": said}
    boundaries = []
    for window, size in enumerate(SIZES):
        with block() if case == "coalesce" else contextlib.nullcontext():
            boundaries.append(_window(engine, case, window, size))
        engine.step()
    if case == "unmanaged":
        said["boundary"] = raised(lambda: engine.set_gradient_accumulation_boundary(True))
        said["coalesce"] = raised(lambda: _tried(engine, engine.coalesce_grad_reduction, {}))
    counts = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    engine.destroy()
    if case == "unmanaged":
        said["overlap"] = raised(lambda: _engine(case, int(stage), overlaps=True).destroy())
    plain = _plain(divided=case != "unmanaged-undivided")
    flat = [
        torch.cat([p.detach().flatten() for p in model.parameters()])
        for model in (engine.module, plain, start)
    ]
    off = (flat[0] - flat[1]).abs().max() / (flat[1] - flat[2]).abs().max()
    return {"off": off.item(), "said": said, "counts": counts, "boundaries": boundaries}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wanted = os.environ.get("CASES")
    report(wanted.split(",") if wanted else NAMES, run)
