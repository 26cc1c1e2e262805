"""Runs that save, and runs that continue from what was saved."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 8
STEPS = 5


class Net(torch.nn.Module):
    """Three layers, the first one maybe frozen."""

    def __init__(self, seed: int, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _engine(deepspeed: Any, stage: int, seed: int, model: Any = None, **sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage},
        **sections,
    }
    return deepspeed.initialize(model=model or Net(seed), config=config)[0]


def _train(engine: Any, first: int, bf16: bool = False) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            data = torch.randn(2, WIDTH, generator=generator)
            loss = engine(data.bfloat16() if bf16 else data).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    return losses


def _folder() -> pathlib.Path:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, 0)
    return pathlib.Path(made[0])


def resume(deepspeed: Any, rank: int, world: int, stage: int, bf16: bool = False) -> list[Any]:
    """Saves after five steps, and continues in the same and in a new engine."""
    sections = {"bf16": {"enabled": True}} if bf16 else {}
    folder, engine = _folder(), _engine(deepspeed, stage, 0, **sections)
    before = _train(engine, 0, bf16)
    engine.save_checkpoint(str(folder), client_state={"epoch": 7})
    after = _train(engine, STEPS, bf16)
    other = _engine(deepspeed, stage, 1, **sections)
    _, client = other.load_checkpoint(str(folder))
    again = _train(other, STEPS, bf16)
    return [before, after, again, other.get_lr(), client["epoch"], other.global_steps]


def part(deepspeed: Any, rank: int, world: int, stage: int, **options: Any) -> list[Any]:
    """Loads only a part of the state."""
    folder, engine = _folder(), _engine(deepspeed, stage, 0)
    _train(engine, 0)
    engine.save_checkpoint(str(folder), tag="five")
    other = _engine(deepspeed, stage, 1)
    place, _ = other.load_checkpoint(str(folder), tag="five", **options)
    steps = other.global_steps
    return [_train(other, STEPS), other.get_lr(), steps, place is not None]


def frozen(deepspeed: Any, rank: int, world: int, stage: int) -> list[Any]:
    """Leaves out parameters that do not train; the new model has the same ones."""
    folder, engine = _folder(), _engine(deepspeed, stage, 0, Net(0, frozen=True))
    before = _train(engine, 0)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
    other = _engine(deepspeed, stage, 0, Net(0, frozen=True))
    other.load_checkpoint(str(folder), load_module_strict=False)
    return [before, _train(other, STEPS)]


def fp32(deepspeed: Any, rank: int, world: int, stage: int) -> list[Any]:
    """Reads whole fp32 weights from a checkpoint, without an engine."""
    from deepspeed.utils.zero_to_fp32 import (  # noqa: PLC0415 - of the package that is tested
        get_fp32_state_dict_from_zero_checkpoint,
    )

    folder, engine = _folder(), _engine(deepspeed, stage, 0)
    before = _train(engine, 0)
    engine.save_checkpoint(str(folder))
    dist.barrier()
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return [before, sorted(found), [float(found[name].double().sum()) for name in sorted(found)]]


def model16(deepspeed: Any, rank: int, world: int, stage: int) -> list[Any]:
    """Saves the weights alone."""
    gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    folder, engine = _folder(), _engine(deepspeed, stage, 0, zero_optimization=gather)
    before = _train(engine, 0)
    engine.save_16bit_model(str(folder), "weights.bin")
    dist.barrier()
    found = torch.load(folder / "weights.bin")
    plain = Net(1)
    plain.load_state_dict(found)
    return [before, sorted(found), float(plain(torch.ones(1, WIDTH)).sum())]


def missing(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """Loads from an empty folder, and trains on."""
    engine = _engine(deepspeed, 2, 0)
    found = engine.load_checkpoint(str(_folder()))
    return [found == (None, None), _train(engine, 0)]


def universal(deepspeed: Any, rank: int, world: int) -> list[Any]:
    """Converts a checkpoint with ds_to_universal, and loads it with load_universal."""
    from deepspeed.checkpoint import (  # noqa: PLC0415 - of the package that is tested
        UNIVERSAL_CHECKPOINT_INFO,
        ds_to_universal,
    )

    folder, engine = _folder(), _engine(deepspeed, 1, 0)
    before = _train(engine, 0)
    client = {UNIVERSAL_CHECKPOINT_INFO: {}, "iteration": STEPS}
    engine.save_checkpoint(str(folder), tag="a", client_state=client)
    after = _train(engine, STEPS)
    if rank == 0:
        ds_to_universal.main(_Arguments(str(folder / "a"), str(folder / "a_universal")))
    dist.barrier()
    other = _engine(deepspeed, 1, 1, checkpoint={"load_universal": True})
    other.load_checkpoint(str(folder), tag="a_universal")
    return [before, after, _train(other, STEPS)]


class _Arguments:
    """Of ds_to_universal."""

    num_extract_workers = num_merge_workers = 1
    keep_temp_folder = inject_missing_state = False
    strict = True

    def __init__(self, source: str, out: str) -> None:
        self.input_folder, self.output_folder = source, out


SCENARIOS: dict[str, Callable[..., list[Any]]] = {
    "resume-stage0": functools.partial(resume, stage=0),
    "resume-stage1": functools.partial(resume, stage=1),
    "resume-stage2": functools.partial(resume, stage=2),
    "resume-stage3": functools.partial(resume, stage=3),
    "resume-stage2-bf16": functools.partial(resume, stage=2, bf16=True),
    "load-module-only": functools.partial(part, stage=2, load_module_only=True),
    "load-no-optimizer": functools.partial(part, stage=3, load_optimizer_states=False),
    "load-no-scheduler": functools.partial(part, stage=1, load_lr_scheduler_states=False),
    "save-without-frozen": functools.partial(frozen, stage=2),
    "zero-to-fp32-stage2": functools.partial(fp32, stage=2),
    "zero-to-fp32-stage3": functools.partial(fp32, stage=3),
    "save-16bit-stage3": functools.partial(model16, stage=3),
    "missing-latest": missing,
    "universal": universal,
}
DIFFERS = {
    "resume-stage2-bf16": "gradients of micro-batches and ranks are summed in fp32; there in bf16",
}
