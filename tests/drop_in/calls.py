"""What the calls of an engine, of its module and of deepspeed's modules return, on DeepSpeed itself
and on Penstock: see loops.py, which it is like."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
from loop_cases import expressions
from loops import Model

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "bf16": {"enabled": False},
}


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.Size, tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    known = isinstance(value, (int, float, str, type(None)))
    return value if known else str(value)


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    for _ in range(6):
        ids = torch.randint(0, 17, (2, 9), generator=generator)
        out = engine(ids[:, :-1])
        engine.backward(torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()))
        engine.step()
    names = {"e": engine, "p": next(model.parameters()), "ds": deepspeed, "torch": torch}
    names["model"] = model
    found = {}
    for one in expressions():
        try:
            found[one] = _plain(eval(one, names))  # noqa: S307 - of the list above
        except Exception as error:  # noqa: BLE001 - recorded
            found[one] = f"raises {type(error).__name__}"
    if deepspeed.comm.get_rank() == 0:
        print("CASE " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
