"""A Lightning module, with Penstock's strategy.

    penstock run --nproc 2 examples/hf/train_lightning.py --stage 3

With --stage -1 it trains under Lightning's own DDP.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from models import build
from text import Bytes
from torch.utils.data import DataLoader

from penstock.lightning import PenstockStrategy


class Module(pl.LightningModule):
    """A language model that keeps its losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = build(name)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        if self.global_rank == 0:
            print(f"step {len(self.losses)}: loss {self.losses[-1]:.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama", help="gpt2, llama or moe")
    parser.add_argument("--stage", type=int, default=3, help="1, 2 or 3; -1: DDP")
    parser.add_argument("--offload", action="store_true", help="optimizer and parameters")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args(argv)
    strategy: Any = "ddp"
    if args.stage > 0:
        offload = {"offload_optimizer": args.offload, "offload_parameters": args.offload}
        strategy = PenstockStrategy(stage=args.stage, **(offload if args.stage == 3 else {}))
    trainer = pl.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(args.model)
    trainer.fit(module, DataLoader(Bytes(count=256), batch_size=4))
    return module.losses


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
