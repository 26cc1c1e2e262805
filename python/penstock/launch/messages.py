"""What the launcher says, on stderr and by level."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOG = logging.getLogger("penstock.launch")
LEVELS = ("debug", "info", "warning", "error", "critical")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment, and goes on when nobody reads it any more."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


def speak(level: str) -> None:
    """From here on messages of at least this level are printed."""
    if not LOG.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("penstock run: %(message)s"))
        LOG.addHandler(handler)
        LOG.propagate = False
    LOG.setLevel(level.upper())
