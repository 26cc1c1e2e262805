"""The launcher's log messages, written to stderr."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOG = logging.getLogger("penstock.launch")
LEVELS = ("debug", "info", "warning", "error", "critical")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, and ignores errors, such as a closed pipe."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


def speak(level: str) -> None:
    """Prints messages of this level and above from now on."""
    if not LOG.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("penstock run: %(message)s"))
        LOG.addHandler(handler)
        LOG.propagate = False
    LOG.setLevel(level.upper())
