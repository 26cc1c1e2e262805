"""Writes the checkpoints of tests/foreign/deepspeed with a DeepSpeed that is installed.

    torchrun --nproc 2 tests/foreign/write_deepspeed.py OUT

A folder for each case: a checkpoint after `BEFORE` steps, and `next.json` with the losses of the
steps that follow it. The model and the data are of tests/foreign/trained.py. With the environment
variables LOCAL_SIZE=2 and DS_ACCELERATOR=cpu it runs without a GPU.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import deepspeed
import torch
from trained import AFTER, BEFORE, CASES, GROUPS, SCHEDULE, Model, batch, config, groups

VERSIONS = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}


UNIVERSAL = "zero3-bf16"


def write(case: str, out: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), **GROUPS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, **SCHEDULE),
        config=config(case),
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


def make_universal(source: pathlib.Path, out: pathlib.Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    tag = f"global_step{BEFORE}"
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(source / tag), "--output_folder", str(out / tag)]
    subprocess.run([*tool, *folders], check=True)
    shutil.copy(source / "next.json", out)


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    # It refuses fp16 on a CPU, where it works, slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    for case in CASES:
        out = root / case
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
        torch.distributed.barrier()
        write(case, out)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        make_universal(root / UNIVERSAL, root / f"{UNIVERSAL}-universal")
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's processes abort at exit on CPU


if __name__ == "__main__":
    main()
