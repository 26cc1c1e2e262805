"""A plain Accelerate loop with DeepSpeed's plugin, as it is written for DeepSpeed.

    penstock run --as-deepspeed --nproc 2 examples/hf/train_accelerate.py --stage 3

With --stage -1, Accelerate runs without DeepSpeed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from models import build
from text import Bytes
from torch.utils.data import DataLoader


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama", help="gpt2, llama or moe")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage; -1: without DeepSpeed")
    parser.add_argument("--offload", default="none", help="none or cpu: for the optimizer state")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local_rank", default=0, help="set by launchers; not read")
    args = parser.parse_args(argv)
    on_cpu = not torch.accelerator.is_available()
    if args.stage < 0:
        accelerator = Accelerator(cpu=on_cpu)
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=args.stage, offload_optimizer_device=args.offload, gradient_clipping=1.0
        )
        group = InitProcessGroupKwargs(backend="gloo" if on_cpu else None)
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group])
    model = build(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    data = DataLoader(Bytes(count=256), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch, _ in zip(data, range(args.steps), strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.6f}")
    accelerator.wait_for_everyone()  # until here, gloo's threads free Python's tensors
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
