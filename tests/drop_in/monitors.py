"""What runs on a rank where DeepSpeed's monitors are tested."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import wandb_files
from pipe_models import batches, built, deepspeed

import penstock
from penstock.front import ranks

ROWS = 2


class Model(torch.nn.Module):
    """Its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x))).float().square().mean()


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "penstock": {"comm": {"timeout_s": 120}},
    } | changes


@contextlib.contextmanager
def _in_folder(folder: str | None) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def without(*modules: str) -> Iterator[None]:
    """As if they were not installed."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def _made(config: dict[str, Any], native: bool) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if native:
            return penstock.initialize(Model(), config)
        model = Model()
        parameters = model.parameters()
        return deepspeed().initialize(model=model, model_parameters=parameters, config=config)[0]


def train(
    config: dict[str, Any], updates: int, native: bool = False, folder: str | None = None
) -> dict[str, list[Any]]:
    """On a rank, by step: its own mean loss (None where the step was skipped), what the engine says
    after it, and DeepSpeed's count of samples."""
    told: dict[str, list[Any]] = {"loss": [], "lr": [], "scale": [], "samples": []}
    parts = int(config.get("gradient_accumulation_steps", 1))
    with _in_folder(folder):
        engine = _made(config, native)
    generator = torch.Generator().manual_seed(1 + ranks.rank())
    half = bool(config.get("fp16"))
    for _ in range(updates):
        losses, skipped = [], engine.skipped_steps
        for _ in range(parts):
            x = torch.randn(ROWS, 8, generator=generator)
            loss = engine(x.half() if half else x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        was_skipped = engine.skipped_steps > skipped
        told["loss"].append(None if was_skipped else sum(losses) / parts)
        told["lr"].append(engine.lr if native else engine.get_lr()[0])
        told["scale"].append(getattr(engine, "cur_scale", None) or engine.loss_scale)
        told["samples"].append((len(told["samples"]) + 1) * ROWS * parts * ranks.world())
    if native:
        engine.close()
    else:
        assert engine.global_samples == told["samples"][-1]
        engine.destroy()
    return told


def train_stages(config: dict[str, Any], updates: int) -> dict[str, Any]:
    """On a rank of a pipeline."""
    model = built("modules", num_stages=2)
    engine = deepspeed().initialize(model=model, config=config)[0]
    told: dict[str, Any] = {"loss": [], "lr": []}
    for step in range(updates):
        told["loss"].append(float(engine.train_batch(batches("modules", step, 0, 2))))
        told["lr"].append(engine.get_lr()[0])
    told["eval"] = float(engine.eval_batch(batches("modules", 9, 0, 2)))
    told["samples"] = engine.global_samples
    engine.destroy()
    return told


def by_hand(folder: str) -> dict[str, Any]:
    """On a rank: a MonitorMaster of the script's own."""
    from deepspeed.monitor.config import get_monitor_config  # noqa: PLC0415 - ours by now
    from deepspeed.monitor.monitor import MonitorMaster  # noqa: PLC0415

    section = {"enabled": True, "output_path": f"{folder}/{ranks.rank()}", "job_name": "job"}
    master = MonitorMaster(get_monitor_config({"csv_monitor": section, "tensorboard": section}))
    value = torch.tensor(2.5, requires_grad=True)
    master.write_events([("My/metric name", value, 7), ("plain", 1, 8)])
    with torch.no_grad():
        value.fill_(9.0)  # what was handed on stays
    master.write_events([("My/metric name", 3.5, 9)])
    found = {
        "enabled": master.enabled,
        "places": [
            getattr(master, f"{one}_monitor") is not None for one in ("tb", "csv", "wandb", "comet")
        ],
    }
    master.close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        master.write_events([("plain", 2, 10)])
    return found | {"said": [str(one.message) for one in said]}


def one_by_one(folder: str) -> dict[str, Any]:
    """On a rank: a place by itself is written when the call returns."""
    from deepspeed.monitor.config import TensorBoardConfig  # noqa: PLC0415
    from deepspeed.monitor.csv_monitor import csvMonitor  # noqa: PLC0415
    from deepspeed.monitor.monitor import Monitor  # noqa: PLC0415
    from deepspeed.monitor.tensorboard import TensorBoardMonitor  # noqa: PLC0415

    section = TensorBoardConfig(enabled=True, output_path=folder)
    csv, board = csvMonitor(section), TensorBoardMonitor(section)
    writer = type(board.summary_writer).__name__
    csv.write_events([("a/b", 1.5, 3)])
    board.write_events([("a/b", 1.5, 3)])
    board.flush()
    if ranks.rank() != 0:
        return {"log_dir": csv.log_dir, "writer": writer}
    return {
        "text": pathlib.Path(csv.log_dir, "a_b.csv").read_text(),
        "names": csv.filenames,
        "writer": writer,
        "kind": isinstance(csv, Monitor),
    }


def raised(config: dict[str, Any], native: bool, hidden: tuple[str, ...]) -> str:
    """On a rank: what initialize() says, and that nothing is left of the engine."""
    with without(*hidden):
        try:
            _made(config, native)
        except (penstock.ConfigError, penstock.RuntimeFault) as error:
            said = str(error)
        else:
            return ""
    train(config_of(), 1)
    return said


def with_wandb(config: dict[str, Any], updates: int, folder: str) -> dict[str, list[Any]]:
    told = train(config, updates, folder=folder)
    wandb_files.flush()
    return told


def with_a_run(config: dict[str, Any], folder: str) -> list[Any]:
    """On a rank: whether the script's own run goes on after the engine."""
    import wandb  # noqa: PLC0415 - takes a second

    run = wandb.init(dir=folder, mode="offline")
    told = train(config, 2)
    left = wandb.run is run
    run.log({"after": 1})
    run.finish()
    wandb_files.flush()
    return [left, told]


def with_comet(config: dict[str, Any], updates: int) -> list[Any]:
    """On a rank: what was called of comet_ml, which is not there."""
    calls: list[Any] = []

    class Experiment:
        def set_name(self, name: str) -> None:
            calls.append(("name", name))

        def log_metric(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def end(self) -> None:
            calls.append(("end",))

    def start(**options: Any) -> Experiment:
        calls.append(("start", options))
        return Experiment()

    fake = types.SimpleNamespace(start=start, __version__="3.50.0")
    sys.modules["comet_ml"] = fake  # type: ignore[assignment]
    try:
        told = train(config, updates)
    finally:
        del sys.modules["comet_ml"]
    return [told, calls]


def with_old_comet(config: dict[str, Any]) -> str:
    sys.modules["comet_ml"] = types.SimpleNamespace(__version__="3.1.0")  # type: ignore[assignment]
    try:
        return raised(config, False, ())
    finally:
        sys.modules.pop("comet_ml", None)


def with_a_slow_disk(config: dict[str, Any]) -> list[Any]:
    """On a rank: whether all steps end before anything is written; what is then written."""
    from penstock.monitor.deepspeed import CsvMonitor  # noqa: PLC0415

    go, before = threading.Event(), CsvMonitor._write
    waited = []

    def slow(self: Any, events: Any) -> None:
        waited.append(go.wait(60))
        before(self, events)

    CsvMonitor._write = slow  # type: ignore[method-assign]
    steps = []
    real = Model.forward

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        steps.append(go.is_set())
        if len(steps) == 5:
            threading.Timer(0.5, go.set).start()
        return real(self, x)

    Model.forward = forward  # type: ignore[method-assign]
    try:
        told = train(config, 5)
    finally:
        CsvMonitor._write, Model.forward = before, real  # type: ignore[method-assign]
    return [told, steps, waited]


def with_a_bad_disk(config: dict[str, Any], file: str) -> list[Any]:
    """On a rank: a folder is in the place of a file."""
    os.makedirs(file)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told = train(config, 4)
    return [told, [str(one.message) for one in said if "[monitor]" in str(one.message)]]
