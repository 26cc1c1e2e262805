"""save_checkpoint() and load_checkpoint() with every argument, case by case.

Started on each rank; see reporting.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO, ds_to_universal
from reporting import report

FOREIGN = pathlib.Path(__file__).parents[1] / "foreign"
sys.path.insert(0, str(FOREIGN))
import trained  # noqa: E402 - from the folder above

WIDTH = 6


class Net(torch.nn.Module):
    """Two layers; the first one may be frozen, and there may be a third."""

    def __init__(self, seed: int, frozen: bool = False, third: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        if third:
            self.third = torch.nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.third(x) if hasattr(self, "third") else x)


def _engine(stage: int, seed: int = 0, frozen: bool = False, third: bool = False,
            **sections: Any) -> Any:  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        **sections,
    }
    return deepspeed.initialize(model=Net(seed, frozen, third), config=config)[0]


def _train(engine: Any, steps: int = 2) -> list[float]:
    generator = torch.Generator().manual_seed(10 * engine.global_steps + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = engine(torch.randn(2, WIDTH, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: one.float() for name, one in engine.native.state_dict(rank0_only=False).items()}


def _same(one: Any, other: Any, prefix: str = "") -> bool:
    return all(torch.equal(one[n], other[n]) for n in one if n.startswith(prefix))


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the error is the result
        names = ",".join(one.__name__ for one in type(error).__mro__)
        return f"{names}: {error}"
    return ""


def resume(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage)
    _train(engine)
    engine.save_checkpoint(folder, client_state={"n": 3})
    expected, lr = _train(engine), engine.get_lr()
    other = _engine(stage, seed=1)
    place, client = other.load_checkpoint(folder)
    steps, got = other.global_steps, _train(other)
    return {"same": got == expected, "lr": other.get_lr() == lr, "client": client, "steps": steps,
            "place": pathlib.Path(place).name}  # fmt: skip


def in_window(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    """A save between two micro-batches: training goes on, and a load continues at the last step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(2, WIDTH, generator=generator) for _ in range(4)]

    def train(engine: Any, micros: range) -> list[float]:
        losses = []
        for micro in micros:
            losses.append(engine(batches[micro]).square().mean())
            engine.backward(losses[-1])
            engine.step()
        return [float(one) for one in losses]

    engine = _engine(stage, gradient_accumulation_steps=2)
    train(engine, range(2))
    saved = _weights(engine)
    before = train(engine, range(2, 3))
    engine.save_checkpoint(folder)
    after = train(engine, range(3, 4))
    other = _engine(stage, seed=1, gradient_accumulation_steps=2)
    other.load_checkpoint(folder)
    loaded = _weights(other)
    again = train(other, range(2, 4))
    return {"weights": _same(saved, loaded), "losses": again == before + after,
            "end": _same(_weights(engine), _weights(other)),
            "steps": [engine.global_steps, other.global_steps]}  # fmt: skip


def only(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage)
    _train(engine, 3)
    engine.save_checkpoint(folder)
    found = {}
    for name, options in (
        ("module", {"load_module_only": True}),
        ("no_optimizer", {"load_optimizer_states": False}),
        ("no_scheduler", {"load_lr_scheduler_states": False}),
    ):
        other = _engine(stage, seed=1)
        fresh = other.lr_scheduler.state_dict()
        other.load_checkpoint(folder, **options)
        found[name] = {
            "weights": _same(_weights(engine), _weights(other)),
            "steps": other.global_steps,
            "scheduler": other.lr_scheduler.state_dict() != fresh,
            "finite": all(one == one for one in _train(other, 1)),
        }
        other.destroy()
    return found


def frozen(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage, frozen=True)
    _train(engine)
    engine.save_checkpoint(folder, tag="all")
    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    size = {tag: sum(one.stat().st_size for one in (folder / tag).glob("*.safetensors"))
            for tag in ("all", "trained")}  # fmt: skip
    strict = _raised(lambda: engine.load_checkpoint(folder, tag="trained"))
    expected = _train(engine)
    other = _engine(stage, seed=1, frozen=True)
    before = _weights(other)
    other.load_checkpoint(folder, tag="trained", load_module_strict=False)
    after, saved = _weights(other), _weights(engine)
    with (
        torch.no_grad(),
        deepspeed.zero.GatheredParameters(list(other.module.first.parameters()), modifier_rank=0),
    ):
        other.module.first.weight.copy_(saved["first.weight"])
        other.module.first.bias.copy_(saved["first.bias"])
    module = None
    file = folder / "trained" / "mp_rank_00_model_states.pt"
    if file.is_file():
        module = sorted(torch.load(file, weights_only=False)["module"])
    return {"smaller": size["trained"] < size["all"], "strict": strict, "module": module,
            "kept": _same(before, after, "first"), "same": _train(other) == expected}  # fmt: skip


def strict(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage, third=True)
    _train(engine)
    engine.save_checkpoint(folder, tag="three", client_state={"n": 1})
    other = _engine(stage, seed=1)
    options = {"tag": "three", "load_module_only": True}
    said = _raised(lambda: other.load_checkpoint(folder, **options))
    _, client = other.load_checkpoint(folder, load_module_strict=False, **options)
    taken = _same(_weights(other), _weights(engine))
    with_states = _raised(
        lambda: other.load_checkpoint(folder, tag="three", load_module_strict=False)
    )
    return {"said": said, "taken": taken, "client": client, "states": with_states}


def tags(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("Fail", "Warn", "Ignore"):
        engine = _engine(stage, checkpoint={"tag_validation": mode})
        tag = f"{mode}{dist.get_rank()}"
        found[mode] = _raised(lambda: engine.save_checkpoint(folder, tag=tag))  # noqa: B023
        engine.destroy()
    found["folders"] = sorted(one.name for one in folder.iterdir() if one.is_dir())
    wrong = {"tag_validation": "foo"}
    found["foo"] = _raised(lambda: _engine(stage, checkpoint=wrong))
    return found


def folders(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage)
    other = folder / f"of{dist.get_rank()}"
    return {
        "none": _raised(lambda: engine.save_checkpoint(None)),
        "empty": _raised(lambda: engine.save_checkpoint("")),
        "differs": _raised(lambda: engine.save_checkpoint(other, tag="a")),
        "missing": engine.load_checkpoint(folder) == (None, None),
        "no_tag": _raised(lambda: engine.load_checkpoint(folder, tag="b")),
    }


def custom(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    """Weights that a function of the script's loads: the last layer twice, in place of others."""
    engine = _engine(stage)
    _train(engine)
    engine.save_checkpoint(folder, client_state={"n": 4})
    kept, found = _weights(engine), {}

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        found["whole"] = [tuple(one.shape) for one in dst.parameters()] == [
            tuple(src[name].shape) for name in ("first.weight", "first.bias") * 2
        ]
        dst.load_state_dict({name: 2.0 * src[name] for name in dst.state_dict()})

    for name, options in (("module", {"load_module_only": True}), ("all", {})):
        other = _engine(stage, seed=1)
        _, client = other.load_checkpoint(folder, custom_load_fn=load, **options)
        doubled = {key: 2.0 * one for key, one in kept.items()}
        same = _same(doubled, _weights(other)) and client == {"n": 4}
        before = other.global_steps
        _train(other, 4)  # the first rates are 0
        found[name] = [same, before, not _same(doubled, _weights(other))]
        other.destroy()
    other = _engine(stage, seed=1, third=True)
    found["strict"] = _raised(lambda: other.load_checkpoint(folder, custom_load_fn=load))
    other.load_checkpoint(
        folder,
        load_module_only=True,
        custom_load_fn=lambda src, dst: dst.load_state_dict(src, strict=False),
    )
    found["other"] = _same(kept, _weights(other))
    return found


def files(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage)
    _train(engine)
    engine.save_checkpoint(folder, tag="a")
    found: dict[str, Any] = {"latest": (folder / "latest").read_text()}
    whole = _weights(engine)
    if dist.get_rank() == 0:
        words = [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(folder / "out")]
        env = {key: one for key, one in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        subprocess.run(words, env=env, check=True, timeout=150)
        made = torch.load(folder / "out" / "pytorch_model.bin")
        found["script"] = made.keys() == whole.keys() and _same(whole, made)
        file = folder / "a" / "mp_rank_00_model_states.pt"
        if stage < 3:
            module = torch.load(file, weights_only=False)["module"]
            found["module"] = module.keys() == whole.keys() and _same(whole, module)
    dist.barrier()
    return found


def universal(folder: pathlib.Path, stage: int) -> dict[str, Any]:
    engine = _engine(stage)
    _train(engine)
    engine.save_checkpoint(folder, tag="a", client_state={UNIVERSAL_CHECKPOINT_INFO: {}, "n": 3})
    expected = _train(engine)
    section = {"load_universal": True}
    other = _engine(stage, seed=1, checkpoint=section)
    missing = _raised(lambda: other.load_checkpoint(folder))
    if dist.get_rank() == 0:
        words = ["--input_folder", str(folder / "a"), "--output_folder", str(folder / "a_u")]
        ds_to_universal.main(ds_to_universal.parse_arguments(words))
    dist.barrier()
    place, client = other.load_checkpoint(folder)
    return {"missing": missing, "same": _train(other) == expected, "client": client,
            "place": pathlib.Path(place).name}  # fmt: skip


def theirs(folder: pathlib.Path, case: str) -> dict[str, Any]:
    """Continues a run that DeepSpeed saved."""
    rank = dist.get_rank()
    if rank == 0:
        shutil.copytree(FOREIGN / "deepspeed" / case, folder, dirs_exist_ok=True)
    dist.barrier()
    model = trained.Model()
    optimizer = torch.optim.AdamW(trained.groups(model), **trained.GROUPS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, **trained.SCHEDULE)
    config = trained.config(case.removesuffix("-universal"))
    config["checkpoint"] = {"load_universal": case.endswith("universal")}
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )[0]
    place, client = engine.load_checkpoint(folder)
    start = [engine.global_steps, engine.skipped_steps]
    losses = []
    for step in range(trained.BEFORE, trained.BEFORE + trained.AFTER):
        loss = engine(trained.batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, losses)
    again = engine.load_checkpoint(folder)[0]  # the earlier conversion is used
    return {"place": pathlib.Path(str(place)).name, "client": client, "start": start,
            "losses": torch.tensor(of_ranks).mean(0).tolist(), "again": again == place}  # fmt: skip


CASES = {
    **{f"theirs-{case}": (theirs, case)
       for case in ("zero1-fp16", "zero2-fp32", "zero3-fp32", "zero3-bf16-universal")},
    **{f"{case.__name__}-stage{stage}": (case, stage)
       for case in (resume, only, frozen, files, custom) for stage in (0, 3)},
    **{f"{case.__name__}-stage{stage}": (case, stage)
       for case in (strict, universal) for stage in (1, 3)},
    **{f"{case.__name__}-stage{stage}": (case, stage)
       for case in (resume, files, tags, folders) for stage in (2,)},
    **{f"in_window-stage{stage}": (in_window, stage) for stage in (0, 1, 2, 3)},
}  # fmt: skip


def _run(name: str) -> dict[str, Any]:
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, 0)
    case, stage = CASES[name]
    found = case(pathlib.Path(made[0]), stage)
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    report(CASES, _run)
