"""A Lightning module, plain and with PenstockStrategy: of the kind of loops.py."""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning_cases import CASES, ON_CUDA
from reporting import report
from torch.utils.data import DataLoader, TensorDataset

from penstock.lightning import PenstockStrategy


class Module(pl.LightningModule):
    """A small one, with an optimizer and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.head = torch.nn.Linear(16, 4)
        self.losses: list[float] = []
        self.device_of_step = ""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = (one.to(self.head.weight.dtype) for one in batch)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss = torch.nn.functional.mse_loss(self.head(x).float(), y.float())
        self.losses.append(loss.item())
        self.device_of_step = str(x.device)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _strategy(case: dict[str, Any]) -> Any:
    if "options" not in case:
        return case.get("strategy", "ddp")
    return PenstockStrategy(**case["options"])


def _data() -> Any:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randn(64, 4, generator=generator)), batch_size=4)


def run(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Losses; where it saves, the files of the checkpoint and a sum of its weights."""
    case = (CASES | ON_CUDA)[name]
    torch.manual_seed(0)
    module = Module()
    place = folder / name
    saver = ModelCheckpoint(place, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = pl.Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=_strategy(case),
        precision=case.get("precision", "32-true"),
        max_steps=8 // case.get("accumulate", 1),
        accumulate_grad_batches=case.get("accumulate", 1),
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver] if "save" in case else [],
        enable_checkpointing="save" in case,
    )
    resume = case.get("resume")
    path = str(folder / resume / "step=4.ckpt") if resume else None
    trainer.fit(module, _data(), ckpt_path=path, weights_only=False if resume else None)
    found: dict[str, Any] = {"losses": module.losses, "device": module.device_of_step}
    if "save" in case and "options" in case:
        torch.distributed.barrier()
        saved = folder / name / "step=4.ckpt"
        found["files"] = sorted(str(one.relative_to(saved)) for one in saved.rglob("*"))
        if int(os.environ["RANK"]) == 0:
            state = convert_zero_checkpoint_to_fp32_state_dict(str(saved), str(folder / "one.pt"))
            weights = state["state_dict"]
            found["names"] = sorted(weights)
            found["sum"] = sum(one.double().sum().item() for one in weights.values())
        torch.distributed.barrier()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    folder = pathlib.Path(sys.argv[1])
    report(sys.argv[2:] or CASES, lambda name: run(name, folder))


if __name__ == "__main__":
    main()
