"""Metric sinks in Python. Their own thread writes the rows, so training never waits for them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import netrc
import os
import pathlib
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from penstock._native import ConfigError

Row = dict[str, Any]
_MOST_WAITING = 1024
_Told = TypeVar("_Told")  # the type of one item, such as a row of metrics
_Taken = TypeVar("_Taken", contravariant=True)


class Sink(Protocol[_Taken]):
    """One destination of metrics. Only the thread of its Sinks calls write()."""

    name: str

    def write(self, row: _Taken, /) -> None: ...

    def close(self) -> None: ...


class Sinks(Generic[_Told]):
    """All sinks of one engine. If a sink raises, one warning is issued and the sink is removed."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sinks: list[Sink[_Told]] = []
        self._queue: queue.Queue[_Told | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._process = os.getpid()

    def add(self, sink: Sink[_Told]) -> None:
        self._sinks.append(sink)
        if self._thread is None:
            atexit.register(self.close)  # for scripts that do not close their engine
            self._thread = threading.Thread(target=self._run, name="penstock-monitor", daemon=True)
            self._thread.start()

    def wanted(self, step: int) -> bool:
        return bool(self._sinks) and step % self._every == 0

    def put(self, row: _Told) -> None:
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes the queued rows, then ends the thread and closes the sinks."""
        if self._thread is None or os.getpid() != self._process:  # a fork has no such thread
            return
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        for sink in self._sinks:
            self._try(sink, sink.close)
        if self._dropped:
            warnings.warn(
                f"[monitor] {self._dropped} rows were dropped: a sink is slower than the steps, so "
                f"write to it less often",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run(self) -> None:
        while (row := self._queue.get()) is not None:
            for sink in list(self._sinks):
                self._try(sink, functools.partial(sink.write, row))

    def _try(self, sink: Sink[_Told], call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # includes sys.exit() in a callback: the thread goes on
            if sink in self._sinks:
                self._sinks.remove(sink)
            warnings.warn(
                f"[monitor] {sink.name} failed and gets no more rows: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


class Callback:
    """A sink that calls the user's function."""

    name = "on_step"

    def __init__(self, call: Callable[[Row], None]) -> None:
        self._call = call

    def write(self, row: Row) -> None:
        self._call(row)

    def close(self) -> None: ...


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None and name != "time"}


def summary_writer(folder: str | pathlib.Path, asks: str) -> Any:
    """Creates torch's TensorBoard writer.

    `asks` names the config setting that requires it. Raises ConfigError with that text if
    tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"[monitor] {asks}, but its package cannot be imported ({error}): "
            f"pip install tensorboard"
        ) from None
    return SummaryWriter(str(folder), flush_secs=10)


class TensorBoard:
    """A sink that writes to the folder "tensorboard" of the run."""

    name = "tensorboard"

    def __init__(self, folder: pathlib.Path) -> None:
        asks = '"monitor.formats" has "tensorboard"'
        self._writer = summary_writer(folder / "tensorboard", asks)

    def write(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(f"train/{name}", value, row["step"], walltime=row["time"])

    def close(self) -> None:
        self._writer.close()


def _logged_in() -> bool:
    """Whether `wandb login` has stored a key in the user's netrc file."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    return False


def wandb_run(asks: str, **options: Any) -> Any:
    """Calls wandb.init(**options), offline if there is no key or WANDB_MODE is "offline".

    `asks` is the same as in summary_writer(). Raises ConfigError if wandb is not installed.
    """
    try:
        import wandb  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"[monitor] {asks}, but its package cannot be imported ({error}): pip install wandb"
        ) from None
    mode: Any = os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") or _logged_in() else "offline"
    )
    return wandb.init(mode=mode, **options)


class Wandb:
    """A sink for Weights & Biases.

    Without a key, or with WANDB_MODE=offline, it writes to the run's folder only.
    """

    name = "wandb"

    def __init__(self, folder: pathlib.Path, config: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        asks = '"monitor.formats" has "wandb"'
        self._run = wandb_run(asks, dir=str(folder), config=json.loads(config))

    def write(self, row: Row) -> None:
        self._run.log({f"train/{k}": v for k, v in _numbers(row).items()}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
