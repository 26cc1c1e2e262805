"""A plain loop of Accelerate, alone and with its DeepSpeed plugin; of the kind of loops.py."""

from __future__ import annotations

import copy
import pathlib
import sys
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DummyOptim, DummyScheduler
from accelerated_cases import CASES
from reporting import report
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8


class Model(torch.nn.Module):
    """A small one with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 16})()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(self.head(x), y)


def _plugin(case: dict[str, Any], stage: int | None = None) -> Any:
    if "config" in case:
        return DeepSpeedPlugin(hf_ds_config=copy.deepcopy(case["config"]), zero3_init_flag=False)
    chosen = {key: value for key, value in case.items() if key.startswith("offload_")}
    return DeepSpeedPlugin(
        zero_stage=case["stage"] if stage is None else stage,
        gradient_accumulation_steps=case.get("accumulate", 1),
        gradient_clipping=1.0,
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
        **chosen,
    )


def _accelerator(case: dict[str, Any]) -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    on_cpu = not torch.cuda.is_available()
    if "stage" not in case and "config" not in case:
        return Accelerator(cpu=on_cpu, gradient_accumulation_steps=case.get("accumulate", 1))
    plugin = _plugin(case)
    plugins = (
        {"first": plugin, "second": _plugin(case, case["second"])} if "second" in case else plugin
    )
    return Accelerator(
        deepspeed_plugin=plugins,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo" if on_cpu else None)],
    )


def _data() -> Any:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randn(64, 4, generator=generator)), batch_size=4)


def _prepared(accelerator: Any, dummy: bool) -> Any:
    torch.manual_seed(0)
    model = Model()
    if dummy:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
        schedule: Any = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, _data(), schedule)


def _loop(accelerator: Any, prepared: Any, steps: int) -> dict[str, Any]:
    model, optimizer, data, schedule = prepared
    losses, rates = [], []
    for batch, _ in zip(data, range(steps), strict=False):
        with accelerator.accumulate(model):
            loss = model(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "rates": rates}


def run(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Losses and rates; where it saves, also of a second half after load_state()."""
    case = CASES[name]
    accelerator = _accelerator(case)
    if "second" in case:
        accelerator.state.select_deepspeed_plugin("first")
    prepared = _prepared(accelerator, case.get("dummy", False))
    if "save" not in case:
        found = _loop(accelerator, prepared, STEPS)
    else:
        found = _loop(accelerator, prepared, 4)
        accelerator.save_state(str(folder / name))
        more = _loop(accelerator, prepared, 4)
        accelerator.load_state(str(folder / name))
        found["again"] = _loop(accelerator, prepared, 4)["losses"] == more["losses"]
        state = accelerator.get_state_dict(prepared[0])
        if accelerator.is_main_process:
            found["names"] = sorted(state)
            found["files"] = sorted(one.name for one in (folder / name).iterdir())
    found["device"] = str(next(prepared[0].parameters()).device)
    if accelerator.num_processes > 1:
        found["ranks"] = accelerator.num_processes
    accelerator.free_memory()
    return found


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    report(sys.argv[2:] or CASES, lambda name: run(name, folder))


if __name__ == "__main__":
    main()
