"""DeepSpeed loops that run on DeepSpeed itself and on Penstock, case by case.

Started on each rank with the names of cases; rank 0 prints one line of JSON for each. The same file
runs with DeepSpeed (record.py) and with Penstock (test_drop_in_loops.py).
"""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
from typing import Any

import deepspeed
import torch
from loop_cases import CASES, STEPS, config_of
from reporting import report


class Model(torch.nn.Module):
    """Embedding, blocks with a residual, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.norm(hidden))


def _listen() -> io.StringIO:
    heard = io.StringIO()
    deepspeed.utils.logger.handlers = [logging.StreamHandler(heard)]
    deepspeed.utils.logger.setLevel(logging.INFO)
    return heard


def run(case: str) -> dict[str, Any]:
    """Losses, norms, rates, counts, lines that were logged, and the files of a checkpoint."""
    torch.manual_seed(0)
    heard = _listen()
    model = Model()
    if case.startswith("built-bf16"):
        model.bfloat16()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(case)
    )
    generator = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        ids = torch.randint(0, 17, (2, 9), generator=generator).to(engine.device)
        out = engine(ids[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        bad = case.startswith("nan") and step == 5
        if case.startswith("zero-grad"):
            engine.zero_grad()
        if case.startswith("plain-backward"):
            loss.backward()
        else:
            engine.backward(loss * float("nan") if bad and deepspeed.comm.get_rank() else loss)
        engine.step()
        losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None or bad else float(norm))
        rates.append(engine.get_lr()[0])
    names = []
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared, 0)
        engine.save_checkpoint(shared[0], client_state={"epoch": 3})
        torch.distributed.barrier()
        for place, _, files in os.walk(shared[0]):
            names += [os.path.relpath(os.path.join(place, one), shared[0]) for one in files]
        torch.distributed.barrier()
    counts = [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps]
    lines = [one for one in heard.getvalue().splitlines() if "step=" in one]
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "counts": counts,
        "files": sorted(names),
        "lines": [one[one.index("step=") :] for one in lines],
        "device": str(next(model.parameters()).device),
    }


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    report(sys.argv[1:] or CASES, run)


if __name__ == "__main__":
    main()
