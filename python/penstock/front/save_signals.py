"""Signals that make engines save (`checkpoint.signals`).

A handler only records the request, because a signal can arrive in the middle of a step. The engines
save at the next end of a step.
"""

import signal
import threading
import weakref
from typing import Any

from penstock._native import ConfigError

_GOES_ON, _ENDS = 1, 2  # what ranks agree on; the larger value wins
_engines: dict[int, "weakref.WeakSet[Any]"] = {}  # by signal
_before: dict[int, Any] = {}  # by signal: the earlier handler


def watch(name: str, engine: Any) -> None:
    """Makes the engine save when the signal arrives. The earlier handler is called, too.

    Raises:
        ConfigError: outside the main thread, because Python sets signal handlers only there.
    """
    signum = signal.Signals[name]
    if signum not in _engines:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                '[front::initialize] "checkpoint.signals" needs the main thread, because Python '
                "sets signal handlers only there. Call initialize() in the main thread"
            )
        _engines[signum] = weakref.WeakSet()
        _before[signum] = signal.signal(signum, _handle)
    _engines[signum].add(engine)


def end_if(urgency: int) -> None:
    """Ends the process, after a save, if a signal of this urgency asks for its end.

    Raises:
        SystemExit: with the exit code of a process that SIGTERM ended.
    """
    if urgency == _ENDS:
        raise SystemExit(128 + signal.SIGTERM)


def _handle(signum: int, frame: Any) -> None:
    living = [one for one in _engines[signum] if one._open() and not one._ranks.copied]
    for one in living:
        one._core.checkpoints.ask(_ENDS if signum == signal.SIGTERM else _GOES_ON)
    before = _before[signum]
    if callable(before):
        before(signum, frame)
    elif not living and before == signal.SIG_DFL:  # no open engine is left to save
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
