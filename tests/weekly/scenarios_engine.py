"""The engine: accumulation, loss scales, optimizers, schedules, several engines in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

WIDTH, STEPS = 8, 10
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, 3, generator=generator)


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, y = data(step, rank)
    return torch.nn.functional.mse_loss(model(x.to(dtype)).float(), y)


def started(deepspeed: Any, stage: int, changes: dict[str, Any] | None = None, **given: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAM,
    } | (changes or {})
    if "optimizer" in given:
        del config["optimizer"]
    torch.manual_seed(0)
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, **given
    )
    return engine


def trained(engine: Any, rank: int, steps: int = STEPS, dtype: Any = torch.float32) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(engine, step, rank, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _plain(stage: int, changes: dict[str, Any]) -> Any:
    def run(deepspeed: Any, rank: int, world: int) -> list[Any]:
        engine = started(deepspeed, stage, changes)
        return trained(engine, rank)

    return run


def _followed(stage: int, changes: dict[str, Any]) -> Any:
    """The calls that return rates, momenta, norms and counts, after each call of step()."""

    def run(deepspeed: Any, rank: int, world: int) -> list[Any]:
        engine = started(deepspeed, stage, changes)
        found = []
        for step in range(STEPS):
            loss = loss_of(engine, step, rank)
            engine.backward(loss)
            engine.step()
            moms = [list(one) if isinstance(one, tuple) else one for one in engine.get_mom()]
            norm = engine.get_global_grad_norm()
            counts = [engine.global_steps, engine.micro_steps, engine.global_samples]
            found.append([loss.item(), engine.get_lr(), moms, float(norm or 0), counts])
        return found

    return run


def no_sync(deepspeed: Any, rank: int, world: int) -> list[float]:
    """Windows of three micro-batches, two of them in no_sync()."""
    engine = started(deepspeed, 0)
    losses = []
    for step in range(STEPS):
        for micro in range(3):
            with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = loss_of(engine, 3 * step + micro, rank)
                engine.backward(loss / 3)
            losses.append(loss.item())
        engine.step()
    return losses


def no_sync_refusals(deepspeed: Any, rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for stage in range(4):
        engine = started(deepspeed, stage)
        try:
            with engine.no_sync():
                engine.backward(loss_of(engine, 0, rank))
                with contextlib.suppress(AssertionError):
                    engine.step()
                    found.append("stepped")
                with contextlib.suppress(AssertionError), engine.no_sync():
                    found.append("entered")
            found.append(stage)
        except AssertionError:
            found.append("refused")
        found.append(engine.global_steps)
    return found


def unmanaged(deepspeed: Any, rank: int, world: int) -> list[Any]:
    engine = started(deepspeed, 2, {"managed_gradient_accumulation": False})
    losses: list[Any] = []
    for step in range(STEPS):
        for micro in range(1 + step % 3):
            loss = loss_of(engine, 3 * step + micro, rank)
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    return [*losses, engine.global_steps, engine.micro_steps, engine.global_samples]


def boundaries(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """Windows of one, two and three micro-batches by set_gradient_accumulation_boundary()."""
    engine = started(deepspeed, 1)
    losses: list[Any] = []
    for step in range(STEPS):
        count = 1 + step % 3
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1)
            loss = loss_of(engine, 3 * step + micro, rank)
            engine.backward(loss / count)
            engine.step()
            losses += [loss.item(), engine.is_gradient_accumulation_boundary()]
    return [*losses, engine.global_steps, engine.micro_steps]


def plain_backward(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = started(deepspeed, 2, {"gradient_accumulation_steps": 2})
    losses = []
    for step in range(2 * STEPS):
        loss = loss_of(engine, step, rank)
        loss.backward()
        engine.step()
        losses.append(loss.item())
    return losses


def _scales(stage: int, overflows: str, **fp16: Any) -> Any:
    """The loss scale after each step, of which those marked "x" overflow on rank 1; counts and
    learning rates."""

    def run(deepspeed: Any, rank: int, world: int) -> list[Any]:
        changes = {
            "fp16": {"enabled": True, "initial_scale_power": 6, **fp16},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        }
        engine = started(deepspeed, stage, changes)
        found = []
        for step, kind in enumerate(overflows):
            loss = loss_of(engine, step, rank, torch.float16)
            engine.backward(loss * float("inf") if kind == "x" and rank == 1 else loss)
            try:
                engine.step()
            except Exception:  # noqa: BLE001 - DeepSpeed raises an Exception
                found.append("raised")
                break
            scaler = engine.optimizer
            scale = scaler.cur_scale if stage else scaler.loss_scale_config.cur_scale
            found.append([scale, engine.skipped_steps, engine.global_steps, engine.get_lr()[0]])
        return found

    return run


def scaled_backward(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """scale() with a plain backward; without it, DeepSpeed refuses to train in fp16."""
    fp16 = {"enabled": True, "initial_scale_power": 4}
    engine = started(deepspeed, 2, {"fp16": fp16})
    found: list[Any] = []
    for step in range(STEPS):
        loss = loss_of(engine, step, rank, torch.float16)
        engine.scale(loss).backward()
        engine.step()
        found.append(engine.skipped_steps)
    try:
        loss_of(engine, 0, rank, torch.float16).backward()
        found.append("trained")
    except RuntimeError:
        found.append("refused")
    return found


def fixed_scale_of_one(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """A plain backward in fp16, whose scale is fixed at 1."""
    engine = started(deepspeed, 2, {"fp16": {"enabled": True, "loss_scale": 1}})
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, step, rank, torch.float16)
        loss.backward()
        engine.step()
        losses.append(round(loss.item(), 2))
    return [*losses, engine.skipped_steps]


def two_engines(deepspeed: Any, rank: int, world: int) -> list[float]:
    """A generator and a critic that train in turn."""
    made, critic = started(deepspeed, 1), started(deepspeed, 1)
    losses = []
    for step in range(STEPS):
        x, y = data(step, rank)
        padded = torch.nn.functional.pad(made(x).detach(), (0, WIDTH - 3))
        judged = critic(padded).square().mean() + (critic(x) - 1).square().mean()
        critic.backward(judged)
        critic.step()
        loss = torch.nn.functional.mse_loss(made(x), y)
        made.backward(loss)
        made.step()
        losses += [judged.item(), loss.item()]
    return losses


def _shared_loss(stage: int) -> Any:
    def run(deepspeed: Any, rank: int, world: int) -> list[float]:
        """One loss of three engines, and one backward."""
        engines = [started(deepspeed, stage) for _ in range(3)]
        losses = []
        for step in range(STEPS):
            loss = sum(loss_of(one, step, rank) / (i + 1) for i, one in enumerate(engines))
            loss.backward()
            for one in engines:
                one.step()
            losses.append(loss.item())
        return losses

    return run


def again(deepspeed: Any, rank: int, world: int) -> list[float]:
    """destroy(), and another engine of the same model."""
    engine = started(deepspeed, 2)
    losses = trained(engine, rank, 5)
    model = engine.module
    engine.destroy()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return losses + trained(engine, rank, 5)


def batch_sizes(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """set_train_batch_size() in the middle."""
    engine = started(deepspeed, 1, {"gradient_accumulation_steps": 2})
    losses: list[Any] = trained(engine, rank, 4)
    engine.set_train_batch_size(4)
    losses += trained(engine, rank, 6)
    counts = [engine.global_steps, engine.global_samples, engine.gradient_accumulation_steps()]
    return [*losses, *counts]


def own_optimizer(deepspeed: Any, rank: int, world: int) -> list[Any]:
    def made(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def rates(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    engine = started(deepspeed, 2, optimizer=made, lr_scheduler=rates)
    return [*trained(engine, rank), engine.get_lr()[0]]


def loader(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """training_data, whose samples each rank gets, with a last batch that is not full."""
    samples = [(torch.full((WIDTH,), i / 10), torch.zeros(3)) for i in range(11)]
    torch.manual_seed(0)
    model = Net()
    engine, _, batches, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": ADAM,
            "dataloader_drop_last": True,
        },
        training_data=samples,
    )
    found: list[Any] = [len(batches)]
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        found += [x[:, 0].tolist(), loss.item()]
    return found


_CYCLE = {
    "type": "OneCycle",
    "params": {
        "cycle_min_lr": 0.001,
        "cycle_max_lr": 0.02,
        "cycle_first_step_size": 4,
        "decay_step_size": 2,
        "decay_lr_rate": 0.1,
    },
}
SCENARIOS = {
    "accumulate-0": _plain(0, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}),
    "accumulate-2": _plain(2, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}),
    "accumulate-3": _plain(3, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}),
    "followed-1": _followed(1, {"gradient_accumulation_steps": 2, "scheduler": _CYCLE}),
    "followed-2": _followed(2, {"scheduler": _CYCLE, "gradient_clipping": 0.2}),
    "sum-of-ranks-1": _plain(1, {"gradient_allreduce_op": "sum", "optimizer": SGD}),
    "sum-of-ranks-clip-2": _plain(
        2, {"gradient_allreduce_op": "SUM", "gradient_clipping": 0.3, "optimizer": SGD}
    ),
    "adagrad": _plain(2, {"optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}),
    "adam-l2": _plain(
        2,
        {
            "optimizer": {
                "type": "Adam",
                "params": {
                    "lr": 0.01,
                    "weight_decay": 0.1,
                    "adam_w_mode": False,
                    "torch_adam": True,
                },
            }
        },
    ),
    "adamw-default-decay": _plain(
        1, {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    ),
    "rmsprop": _plain(1, {"optimizer": {"type": "RMSprop", "params": {"lr": 0.001}}}),
    "own-optimizer": own_optimizer,
    "no-sync": no_sync,
    "no-sync-refusals": no_sync_refusals,
    "unmanaged": unmanaged,
    "boundaries": boundaries,
    "plain-backward": plain_backward,
    "scale-window-1": _scales(1, "........x......", loss_scale_window=3),
    "scale-hysteresis-2": _scales(2, ".xx.x..x.xx....", loss_scale_window=2),
    "scale-hysteresis-3": _scales(3, "xx.xxx....xxxx.", loss_scale_window=3, hysteresis=3),
    "scale-consecutive-1": _scales(
        1, "x.x.xx.xx.x....", loss_scale_window=4, hysteresis=2, consecutive_hysteresis=True
    ),
    "scale-exhausted-2": _scales(2, ".xxx..", hysteresis=1, min_loss_scale=16),
    "scale-stage-0": _scales(0, ".xxxxxxxxx.....", loss_scale_window=2, min_loss_scale=2),
    "scaled-backward": scaled_backward,
    "fixed-scale-of-one": fixed_scale_of_one,
    "two-engines": two_engines,
    "shared-loss-1": _shared_loss(1),
    "shared-loss-3": _shared_loss(3),
    "again": again,
    "batch-sizes": batch_sizes,
    "loader": loader,
}
