"""What deepspeed.initialize()'s engine costs beside Penstock's own: the same steps in turn.

    penstock run --nproc 2 benchmarks/drop_in.py [--rounds 30] [--json FILE]

A GPT of 1.6M parameters, which each of the two trains on the same data; their losses are equal.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import torch
from measure import init_group, machine, write_json

import penstock
import penstock.deepspeed

penstock.deepspeed.install()
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "hf"))

import deepspeed  # noqa: E402
import transformers  # noqa: E402
from text import Bytes  # noqa: E402

STAGES = (0, 1, 2, 3)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_layer": 8, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**sizes, **quiet))


def step_of(engine: object, batch: dict[str, torch.Tensor]) -> float:
    begun = time.perf_counter()
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    spent = time.perf_counter() - begun
    step_of.loss = loss.item()
    return spent


def compare(stage: int, rounds: int) -> dict[str, float]:
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    own = penstock.initialize(
        copy.deepcopy(model),
        {
            "strategy": "ddp" if stage == 0 else f"zero{stage}",
            "precision": "fp32",
            "clip": 1.0,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        },
    )
    theirs, _, _, _ = deepspeed.initialize(model=model, config=config)
    rows = Bytes(length=128, count=4 * (rounds + 3))
    ratios, times, losses = [], {"native": [], "drop-in": []}, []
    for index in range(rounds + 3):
        pieces = [rows[4 * index + i] for i in range(4)]
        batch = {key: torch.stack([one[key] for one in pieces]) for key in pieces[0]}
        order = [("native", own), ("drop-in", theirs)]
        spent, seen = {}, {}
        for name, engine in order if index % 2 else order[::-1]:
            spent[name] = step_of(engine, batch)
            seen[name] = step_of.loss
        losses.append(abs(seen["native"] - seen["drop-in"]))
        if index >= 3:
            ratios.append(spent["drop-in"] / spent["native"])
            for name, value in spent.items():
                times[name].append(value)
    own.close()
    theirs.destroy()
    return {
        "ratio": statistics.median(ratios),
        "native_ms": statistics.median(times["native"]) * 1e3,
        "drop_in_ms": statistics.median(times["drop-in"]) * 1e3,
        "loss_gap": max(losses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json")
    args = parser.parse_args()
    init_group()
    found = {f"stage{stage}": compare(stage, args.rounds) for stage in STAGES}
    if torch.distributed.get_rank() == 0:
        for name, one in found.items():
            print(
                f"{name}: drop-in {one['drop_in_ms']:.2f} ms, native {one['native_ms']:.2f} ms, "
                f"ratio {one['ratio']:.3f}, losses differ by {one['loss_gap']:.1e}"
            )
        if args.json:
            write_json(args.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
