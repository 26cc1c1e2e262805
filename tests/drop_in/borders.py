"""Checkpoints and engines where loops meet their borders: see loops.py, which it is like."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import deepspeed
import torch
from loops import Model

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def _engine(model: Any, stage: int, **changes: Any) -> Any:
    config = CONFIG | {"zero_optimization": {"stage": stage}} | changes
    return deepspeed.initialize(model=model, config=config)[0]


def _train(engine: Any, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 17, (2, 9), generator=generator)
        out = engine(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _raised(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - that is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


def loads(stage: int, folder: str) -> dict[str, Any]:
    """What load_checkpoint() does with tags, states of ranks, and another accumulation."""
    rank = deepspeed.comm.get_rank()
    engine = _engine(Model(), stage, gradient_accumulation_steps=3)
    _train(engine, 3)
    nothing = engine.load_checkpoint(folder + "/none")
    engine.save_checkpoint(folder, tag=0, client_state={"rank": rank})
    state = engine.load_checkpoint(folder, tag=0)[1]
    missing = _raised(engine.load_checkpoint, folder, tag="typo")
    engine.destroy()
    again = _engine(Model(), stage, gradient_accumulation_steps=2)
    again.load_checkpoint(folder)
    _train(again, 4)
    counts = [again.global_steps, again.micro_steps]
    again.destroy()
    own = torch.tensor([float(state["rank"] == rank)])
    torch.distributed.all_reduce(own)
    return {"nothing": nothing, "own": own.item(), "missing": missing, "counts": counts}


def engines(stage: int) -> dict[str, Any]:
    """Engines one after the other over a model, and one that only reads."""
    torch.manual_seed(0)
    model = Model()
    reads = deepspeed.initialize(
        model=model, config={"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    )[0]
    with torch.no_grad():
        reads(torch.zeros(2, 4, dtype=torch.long))
    reads.destroy()
    first = _engine(model, stage)
    losses = _train(first, 2)
    second = _engine(model, stage)  # ends the first
    losses += _train(second, 2)
    said = [_raised(_train, first, 1), _raised(first.step)]
    second.destroy()
    trains = all(one.requires_grad for one in model.parameters())
    return {"losses": losses, "trains": trains, "said": said}


def ranks_differ(stage: int) -> dict[str, Any]:
    """Values of another rank's own, and pieces of a tiled weight."""
    from deepspeed.utils import (  # noqa: PLC0415 - beside its use
        safe_get_full_fp32_param,
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
    )

    model = Model()
    engine = _engine(model, stage)
    param = model.head.weight
    before = safe_get_full_fp32_param(param)
    said = _raised(safe_set_full_fp32_param, param, before + deepspeed.comm.get_rank())
    same = torch.equal(safe_get_full_fp32_param(param), before)
    engine.destroy()
    wide = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 4))
    tiled = _engine(wide, 3, penstock={"tiling": {"max_bytes": 32768}})
    pieces = _raised(safe_get_local_fp32_param, wide[0].weight)
    tiled.destroy()
    return {"said": said, "same": same, "pieces": pieces}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (1, 2, 3):
        shared = [tempfile.mkdtemp()]
        torch.distributed.broadcast_object_list(shared, 0)
        found = {
            "loads": loads(stage, shared[0]),
            "engines": engines(stage),
            "ranks_differ": ranks_differ(stage),
        }
        if deepspeed.comm.get_rank() == 0:
            print("\nCASE " + json.dumps({f"stage{stage}": found}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
