"""One step with each of tests/configs: see loops.py, which it is like. Argument: a folder."""

from __future__ import annotations

import json
import pathlib
import sys
import warnings
from typing import Any

import deepspeed
import torch
from config_outcomes import filled
from loops import Model
from reporting import report

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def run(path: pathlib.Path, folder: str) -> dict[str, Any]:
    text = path.read_text().replace("NVME", folder)
    torch.manual_seed(0)
    model = Model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given: Any = text if "//" in text else filled(json.loads(text), train_batch_size=2)
        optimizer = None
        if isinstance(given, dict) and "optimizer" not in given:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=given
        )
    ids = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(engine.gradient_accumulation_steps()):
        out = engine(ids[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
    found = {
        "loss": loss.item(),
        "steps": engine.global_steps,
        "applied": engine.was_step_applied(),
        "said": [str(one.message) for one in said if "without effect" in str(one.message)],
    }
    engine.destroy()
    return found


def main() -> None:
    deepspeed.init_distributed()
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    report(names, lambda name: run(CONFIGS / f"{name}.json", sys.argv[1]))


if __name__ == "__main__":
    main()
