"""Writers of metrics."""

from __future__ import annotations

from typing import Any

from ..utils.logging import logger


class Monitor:
    """One that writes."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = False

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Writes (name, value, sample) of this list."""


class MonitorMaster(Monitor):
    """All that a config enables: none is built yet, which the warning of the config says."""

    def __init__(self, monitor_config: Any = None) -> None:
        super().__init__(monitor_config)
        logger.debug("deepspeed.monitor: events are not written yet")
