"""DeepSpeed's logger and logging functions."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def _make() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    made.setLevel(log_levels.get(os.environ.get("DS_LOG_LEVEL", "").lower(), logging.WARNING))
    made.propagate = False
    if not made.handlers:
        handler = logging.StreamHandler(stream=sys.stdout)
        layout = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
        handler.setFormatter(logging.Formatter(layout))
        made.addHandler(handler)
    return made


logger = _make()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all ranks if the list is empty or has -1."""
    if not ranks or -1 in ranks or _rank() in ranks:
        logger.log(level, f"[Rank {_rank()}] {message}", stacklevel=2)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """Calls log_dist() once for each text."""
    _once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def _once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    """Logs a warning once for each text."""
    logger.warning(message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Prints the message on rank 0 if `force` is set."""
    if force and _rank() == 0:
        print(message)


def set_log_level_from_string(log_level: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(log_levels[log_level.lower()])
