"""Writes the checkpoints of tests/foreign/deepspeed with a DeepSpeed that is installed.

    torchrun --nproc 2 tests/foreign/write_deepspeed.py OUT

A folder for each stage and precision: a checkpoint after `BEFORE` steps, and `next.json` with the
losses of the steps that follow it. The model and the data are of tests/foreign/trained.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
from typing import Any

import deepspeed
import torch
from trained import AFTER, BEFORE, GROUPS, SCHEDULE, Model, batch, groups

VERSIONS = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}


def config(stage: int, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def write(stage: int, precision: str, out: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), **GROUPS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, **SCHEDULE),
        config=config(stage, precision),
    )
    rank, losses = torch.distributed.get_rank(), []
    for step in range(BEFORE + AFTER):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / 2)
        if step + 1 == BEFORE:
            engine.save_checkpoint(str(out), client_state={"epoch": 1, "best": 0.5})
    if rank == 0:
        for script in out.glob("*.py"):  # that DeepSpeed copies to it
            script.unlink()
        said = {"losses": losses[BEFORE:], "versions": VERSIONS}
        (out / "next.json").write_text(json.dumps(said) + "\n")


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16"):
            out = root / f"zero{stage}-{precision}"
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(out, ignore_errors=True)
            torch.distributed.barrier()
            write(stage, precision, out)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's processes abort at exit on CPU


if __name__ == "__main__":
    main()
