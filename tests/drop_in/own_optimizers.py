"""User-defined optimizers through deepspeed.initialize(), Accelerate and Trainer; see loops.py.

Each case trains, evaluates with the average, and trains on. It tells how far the weights are from
those of plain torch, and how far ranks are from each other. SAM's first step is refused instead.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from own_optimizer_cases import NAMES, REFUSED
from reporting import report
from test_optimizers_outside_step import Own, Sam, ScheduleFree

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


class Ema(Own):
    """Swaps its average with the weights."""

    def after(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("average", p.clone()).lerp_(p, 0.25)

    def swap(self) -> None:
        for _, p, state in self.each():
            if "average" in state:
                kept = p.data.clone()
                p.data.copy_(state["average"])
                state["average"].copy_(kept)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer (arXiv:1907.08610), and shows its slow weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.steps = inner, 0

    def each(self) -> Any:
        return [(p, self.state[p]) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, state in self.each():
            state.setdefault("slow", p.clone())
        self.inner.step()
        self.steps += 1
        if self.steps % 4 == 0:
            for p, state in self.each():
                p.copy_(state["slow"].lerp_(p, 0.5))

    @torch.no_grad()
    def backup(self) -> None:
        for p, state in self.each():
            state["fast"] = p.clone()
            p.copy_(state["slow"])

    def restore(self) -> None:
        for p, state in self.each():
            if "fast" in state:
                p.data.copy_(state.pop("fast"))


def wrapped(params: Any) -> Lookahead:
    return Lookahead(torch.optim.SGD(params, lr=0.05, momentum=0.5))


# How it is built; the methods that are called before training and before an evaluation.
KINDS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "free": (ScheduleFree, "train", "eval"),
    "lookahead": (wrapped, "restore", "backup"),
    "ema": (Ema, "swap", "swap"),
    "sam": (Sam, "", "first_step"),
}


def call(optimizer: Any, name: str) -> None:
    """Calls a method of an optimizer, which Accelerate wraps."""
    if name:
        (getattr(optimizer, name, None) or getattr(optimizer.optimizer, name))()


def told(optimizer: Any, name: str) -> str:
    try:
        call(optimizer, name)
    except RuntimeError as error:
        return str(error)
    return ""


def plain(kind: str, evaluations: int) -> list[torch.Tensor]:
    make, train, show = KINDS[kind]
    model, seen = Line(), []
    optimizer = make(model.parameters())
    for span in range(evaluations):
        call(optimizer, train)
        for step in range(span * STEPS, (span + 1) * STEPS):
            optimizer.zero_grad()
            model(batch(step))["loss"].backward()
            optimizer.step()
        if kind != "sam":
            call(optimizer, show)
        seen.append(model.weight.detach().clone())
    call(optimizer, train)
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


def config_of(stage: int, dtype: str, offload: bool = False) -> dict[str, Any]:
    away = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    # Otherwise Accelerate replaces an offloaded optimizer by DeepSpeedCPUAdam.
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage} | away,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
    }


def by_deepspeed(kind: str, config: dict[str, Any], errors: list[str]) -> list[torch.Tensor]:
    make, train, show = KINDS[kind]
    model, seen = Line(), []
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=make(model.parameters()), config=config
    )
    for span in range(2):
        call(optimizer, train)
        for step in range(span * STEPS, (span + 1) * STEPS):
            engine.backward(engine(batch(step))["loss"])
            if kind == "sam":
                errors.append(told(optimizer, show))
            engine.step()
        if kind != "sam":
            call(optimizer, show)
        looked(engine.native, seen)
    call(optimizer, train)
    looked(engine.native, seen)
    engine.destroy()
    return seen


def by_accelerate(kind: str, config: dict[str, Any], errors: list[str]) -> list[torch.Tensor]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    make, train, show = KINDS[kind]
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model, seen = Line(), []
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    for span in range(2):
        call(optimizer, train)
        for step in range(span * STEPS, (span + 1) * STEPS):
            accelerator.backward(model(batch(step))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if kind == "sam":
            errors.append(told(optimizer, show))
        else:
            call(optimizer, show)
        looked(native_of(model), seen)
    call(optimizer, train)
    looked(native_of(model), seen)
    accelerator.free_memory()
    native_of(model).close()
    return seen


def by_trainer(kind: str, config: dict[str, Any], errors: list[str]) -> list[torch.Tensor]:
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
        deepspeed=config,
        bf16=config["bf16"]["enabled"],
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
            self.optimizer = KINDS[kind][0](self.model.parameters())
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
    how, kind, stage, dtype, *offload = name.split()
    torch.manual_seed(0)
    errors: list[str] = []
    config = config_of(int(stage[-1]), dtype, bool(offload))
    seen = globals()[f"by_{how}"](kind, config, errors)
    expected = plain(kind, 2)
    assert len(seen) == len(expected), f"{len(seen)} looks"
    off = max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))
    all_off: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_off, off)
    swapped = float((expected[1] - expected[2]).abs().max())
    return {"off": all_off, "swapped": swapped, "errors": errors}


def main() -> None:
    dist.init_process_group("gloo")
    report(sys.argv[1:] or [*NAMES, *REFUSED], run)


if __name__ == "__main__":
    main()
