"""Scenarios of ZeRO: building sharded models, single parameters and their state, windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH, STEPS = 8, 10


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def config(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": zero,
    } | changes


def started(ds: Any, model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    trained = [one for one in model.parameters() if one.requires_grad]
    return ds.initialize(model=model, model_parameters=trained, config=settings)[0]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2, WIDTH, generator=generator)
    return x, torch.randint(0, 4, (2,), generator=generator)


def trained(
    engine: Any,
    rank: int,
    *,
    between: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
    steps: int = STEPS,
) -> list[Any]:
    """Losses, and what `between` (after backward) and `after` (after the step) return, if any."""
    found: list[Any] = []
    for step in range(steps):
        x, y = batch(step, rank)
        out = engine(x)
        loss = functional.cross_entropy(out, y)
        engine.backward(loss)
        seen = between(step)
        engine.step()
        more = after(step)
        found += [loss.item(), *[one for one in (seen, more) if one is not None]]
    return found


def cases(name: str, run: Callable[..., list[Any]], stages: tuple[int, ...] = (1, 3)) -> None:
    """Adds a scenario of each stage: run(deepspeed, rank, stage)."""
    for stage in stages:
        SCENARIOS[f"{name}_stage{stage}"] = lambda ds, rank, world, at=stage: run(ds, rank, at)


SCENARIOS: dict[str, Callable[..., list[Any]]] = {}


def tiled(ds: Any, rank: int, stage: int) -> list[Any]:
    """The head in six tiles, with the values of a whole layer."""
    whole = torch.nn.Linear(WIDTH, 4)
    with ds.zero.Init(enabled=stage == 3, config_dict_or_path=config(stage)):
        model = Net()
        model.head = ds.zero.TiledLinear(WIDTH, 4, in_splits=3, out_splits=2)
    model.head.copy_params_from(whole)
    return trained(started(ds, model, config(stage)), rank)


def init(ds: Any, rank: int, stage: int) -> list[Any]:
    """Built in nested contexts and by an existing module; rank 1 sets values before training."""
    settings = config(stage)
    with ds.zero.Init(config_dict_or_path=settings), ds.zero.Init(config_dict_or_path=settings):
        model = Net()
    ds.zero.Init(module=model, config_dict_or_path=settings)
    with ds.zero.GatheredParameters(model.head.parameters(), modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(model.head.weight, 0.125)
    return trained(started(ds, model, settings), rank)


def init_off(ds: Any, rank: int, stage: int) -> list[Any]:
    with ds.zero.Init(enabled=False, config_dict_or_path=config(stage), dtype=torch.half):
        model = Net()
    names = [hasattr(one, "ds_id") for one in model.parameters()]
    return [names, *trained(started(ds, model, config(stage)), rank)]


def init_remote(ds: Any, rank: int, stage: int) -> list[Any]:
    with ds.zero.Init(remote_device="cpu", config_dict_or_path=config(stage)):
        model = Net()
    return trained(started(ds, model, config(stage)), rank)


def masters(ds: Any, rank: int, stage: int) -> list[Any]:
    """Norms of masters, moments and gradients; None of the frozen block."""
    return states(ds, rank, config(stage))


def masters_offload(ds: Any, rank: int, stage: int) -> list[Any]:
    """The same with the optimizer in host memory."""
    settings = config(stage, zero={"offload_optimizer": {"device": "cpu"}})
    return states(ds, rank, settings | {"zero_force_ds_cpu_optimizer": False})


def states(ds: Any, rank: int, settings: dict[str, Any]) -> list[Any]:
    model = Net()
    model.blocks[1].requires_grad_(False)
    engine = started(ds, model, settings)
    params = [model.blocks[0].weight, model.blocks[1].weight, model.head.bias]

    def norm(value: torch.Tensor | None) -> Any:
        return "none" if value is None else value.float().norm().item()

    def between(step: int) -> list[Any]:
        return [norm(ds.utils.safe_get_full_grad(one)) for one in params]

    def after(step: int) -> list[Any]:
        get = ds.utils.safe_get_full_optimizer_state
        known = [norm(get(one, "exp_avg")) for one in params if one.requires_grad]
        return known + [norm(ds.utils.safe_get_full_fp32_param(one)) for one in params]

    return trained(engine, rank, between=between, after=after)


def set_gradient(ds: Any, rank: int, stage: int) -> list[Any]:
    """Gradients replaced by their signs, one by one and vectorised."""
    model = Net()
    engine = started(ds, model, config(stage))

    def between(step: int) -> None:
        one = model.head.weight
        ds.utils.safe_set_full_grad(one, ds.utils.safe_get_full_grad(one).sign())
        ds.utils.safe_update_full_grad_vectorized(
            list(model.blocks.parameters()), lambda gradient, param: gradient.clamp(-0.01, 0.01)
        )

    return trained(engine, rank, between=between)


def set_moment(ds: Any, rank: int, stage: int) -> list[Any]:
    model = Net()
    engine = started(ds, model, config(stage))

    def after(step: int) -> None:
        if step % 3 == 0:
            one = model.head.weight
            zeros = torch.zeros(one.ds_shape if stage == 3 else one.shape)
            ds.utils.safe_set_full_optimizer_state(one, zeros, "exp_avg")

    return trained(engine, rank, after=after)


def set_master(ds: Any, rank: int, stage: int) -> list[Any]:
    model = Net()
    engine = started(ds, model, config(stage))

    def after(step: int) -> None:
        if step == 3:
            one = model.head.weight
            half = ds.utils.safe_get_full_fp32_param(one) * 0.5
            ds.utils.safe_set_full_fp32_param(one, half)

    return trained(engine, rank, after=after)


class Result:
    """An output that is a plain object."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Objects(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x))


def objects(ds: Any, rank: int, stage: int) -> list[Any]:
    model = Objects()
    engine, losses = started(ds, model, config(stage)), []
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = functional.cross_entropy(engine(x).logits, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Delegating(torch.nn.Module):
    """Looks up missing attributes in the module that it wraps."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x)


def delegating(ds: Any, rank: int, stage: int) -> list[Any]:
    model = Net()
    model.blocks[1], model.head = Delegating(model.blocks[1]), Delegating(model.head)
    return trained(started(ds, model, config(stage)), rank)


class Alternating(Net):
    """Another block in each forward, which DeepSpeed only trains in a leaf module."""

    turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.head(x + torch.tanh(self.blocks[self.turn % 3](x)))


def leaves(ds: Any, rank: int, stage: int) -> list[Any]:
    model = Alternating()
    found = ds.utils.set_z3_leaf_modules(model, [Net])
    names, missing = ds.utils.set_z3_leaf_modules_by_name(
        model, ["head", "none"], raise_if_not_found=False
    )
    ends = ds.utils.set_z3_leaf_modules_by_suffix(model, ["0"])[0]
    marked = [found == [model], names == [model.head], missing, ends == [model.blocks[0]]]
    engine, losses = started(ds, model, config(stage)), []
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = functional.cross_entropy(engine(x.requires_grad_()), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return [*marked, *losses]


class External(Net):
    """A block's weight is used in another module, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(functional.linear(x, self.blocks[0].weight))
        return x


def external(ds: Any, rank: int, stage: int) -> list[Any]:
    model = External()
    ds.zero.register_external_parameter(model, model.blocks[0].weight)
    return trained(started(ds, model, config(stage)), rank)


def generation(ds: Any, rank: int, stage: int) -> list[Any]:
    """Whole parameters between steps."""
    from deepspeed.runtime.zero import unwrap_model_for_generation  # noqa: PLC0415 - the package's

    model = Net()
    settings = config(stage, zero={"offload_param": {"device": "cpu"}})
    engine = started(ds, model, settings)

    def after(step: int) -> float:
        with unwrap_model_for_generation(engine) as whole, torch.no_grad():
            return whole(batch(0, 0)[0]).sum().item()

    return trained(engine, rank, after=after)


def unmanaged(ds: Any, rank: int, stage: int) -> list[Any]:
    """Each step() ends a window; the script divides."""
    engine = started(
        ds,
        Net(),
        config(
            stage,
            managed_gradient_accumulation=False,
            gradient_accumulation_steps=4,
            zero={"overlap_comm": False},
        ),
    )
    losses: list[Any] = []
    for window, size in enumerate((2, 5, 1, 3)):
        for micro in range(size):
            x, y = batch(10 * window + micro, rank)
            loss = functional.cross_entropy(engine(x), y)
            engine.backward(loss / size, scale_wrt_gas=False)
            losses.append(loss.item())
        engine.step()
        losses += [engine.global_steps, engine.global_samples, engine.was_step_applied()]
    return losses


def boundary(ds: Any, rank: int, stage: int) -> list[Any]:
    """The script says where windows end."""
    engine = started(ds, Net(), config(stage))
    losses: list[Any] = []
    for window, size in enumerate((2, 5, 1, 3)):
        for micro in range(size):
            engine.set_gradient_accumulation_boundary(micro == size - 1)
            x, y = batch(10 * window + micro, rank)
            loss = functional.cross_entropy(engine(x), y)
            engine.backward(loss / size)
            losses += [loss.item(), engine.is_gradient_accumulation_boundary()]
        engine.step()
    return losses


cases("tiled", tiled, (1, 2, 3))
cases("zero_init", init, (3,))
cases("zero_init_off", init_off, (2, 3))
cases("zero_init_remote", init_remote, (3,))
cases("masters", masters, (1, 2, 3))
cases("masters_offload", masters_offload, (1, 2, 3))
cases("set_gradient", set_gradient, (1, 2, 3))
cases("set_moment", set_moment, (1, 3))
cases("set_master", set_master, (1, 3))
cases("object_output", objects, (2, 3))
cases("delegating", delegating, (3,))
cases("leaf_modules", leaves, (3,))
cases("external_parameter", external, (3,))
cases("generation", generation, (3,))
cases("unmanaged", unmanaged, (0, 1, 2, 3))
cases("boundary", boundary, (1, 2, 3))

DIFFERS = {
    "leaf_modules_stage3": (
        "DeepSpeed updates unused parameters with gradients of zeros, which plain torch skips"
    ),
    "set_master_stage1": "DeepSpeed delays the edit of a weight by a step",
    "set_master_stage3": "DeepSpeed delays the edit of a weight by a step",
}
