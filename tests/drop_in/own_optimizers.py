"""A schedule-free optimizer through deepspeed.initialize(), Accelerate and Trainer; see loops.py.

Each case trains, evaluates with the average, and trains on. It tells how far the weights are from
those of plain torch, and how far ranks are from each other.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from own_optimizer_cases import NAMES
from reporting import report
from test_optimizers_outside_step import ScheduleFree

STEPS = 3


class Line(torch.nn.Module):
    """Its gradient is its input: whole numbers, which bf16 does not round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 35).reshape(5, 7))
        self.config = type("Config", (), {"hidden_size": 8})()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight.float() * x.float().sum(0)).sum() / len(x)}


def batch(step: int) -> torch.Tensor:
    return (torch.arange(35).reshape(1, 5, 7) + step) % 5 - 2.0


def plain(evaluations: int) -> list[torch.Tensor]:
    model, seen = Line(), []
    optimizer = ScheduleFree(model.parameters())
    for span in range(evaluations):
        optimizer.train()
        for step in range(span * STEPS, (span + 1) * STEPS):
            optimizer.zero_grad()
            model(batch(step))["loss"].backward()
            optimizer.step()
        optimizer.eval()
        seen.append(model.weight.detach().clone())
    optimizer.train()
    return [*seen, model.weight.detach().clone()]


def native_of(model: Any) -> Any:
    return getattr(model, "native", None) or model.module.native


def looked(native: Any, seen: list[torch.Tensor]) -> None:
    """Notes the masters, after a check that the parameters show them."""
    full = native.state_dict(rank0_only=False)["weight"]
    with native.gathered():
        shown = native.module.weight.detach().clone()
    assert torch.equal(shown, full.to(shown.dtype)), "the parameters do not show the masters"
    seen.append(full)


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
    }


def by_deepspeed(stage: int, dtype: str) -> list[torch.Tensor]:
    model, seen = Line(), []
    given = ScheduleFree(model.parameters())
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=given, config=config_of(stage, dtype)
    )
    for span in range(2):
        optimizer.train()
        for step in range(span * STEPS, (span + 1) * STEPS):
            engine.backward(engine(batch(step))["loss"])
            engine.step()
        optimizer.eval()
        looked(engine.native, seen)
    optimizer.train()
    looked(engine.native, seen)
    engine.destroy()
    return seen


def by_accelerate(stage: int, dtype: str) -> list[torch.Tensor]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(stage, dtype), zero3_init_flag=False)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model, seen = Line(), []
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters()))
    for span in range(2):
        optimizer.train()
        for step in range(span * STEPS, (span + 1) * STEPS):
            accelerator.backward(model(batch(step))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        looked(native_of(model), seen)
    optimizer.train()
    looked(native_of(model), seen)
    accelerator.free_memory()
    native_of(model).close()
    return seen


def by_trainer(stage: int, dtype: str) -> list[torch.Tensor]:
    import transformers  # noqa: PLC0415 - slow

    AcceleratorState._reset_state()
    GradientState._reset_state()
    model, seen = Line(), []
    # Each rank's sampler takes every second item, and both items of a step are equal.
    data = [
        {"x": batch(step)[0]} for step in range(2 * STEPS) for _ in range(dist.get_world_size())
    ]
    settings = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=config_of(stage, dtype),
        bf16=dtype == "bf16",
        use_cpu=True,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=2 * STEPS,
        eval_strategy="steps",
        eval_steps=STEPS,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
    )

    class Looks(transformers.TrainerCallback):
        def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
            looked(native_of(trainer.model_wrapped), seen)

    class Own(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = ScheduleFree(self.model.parameters())
            return self.optimizer

        def create_scheduler(self, *_: Any, optimizer: Any = None, **__: Any) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda _: 1.0
            )
            return self.lr_scheduler

    trainer = Own(model, settings, train_dataset=data, eval_dataset=data[:2], callbacks=[Looks()])
    trainer.train()
    trainer.optimizer.train()
    looked(native_of(trainer.model_wrapped), seen)
    native_of(trainer.model_wrapped).close()
    return seen


def run(name: str) -> dict[str, Any]:
    how, stage, dtype = name.split()
    torch.manual_seed(0)
    seen = globals()[f"by_{how}"](int(stage[-1]), dtype)
    expected = plain(2)
    assert len(seen) == len(expected), f"{len(seen)} looks"
    off = max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))
    all_off: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_off, off)
    return {"off": all_off, "swapped": float((expected[1] - expected[2]).abs().max())}


def main() -> None:
    dist.init_process_group("gloo")
    report(sys.argv[1:] or NAMES, run)


if __name__ == "__main__":
    main()
