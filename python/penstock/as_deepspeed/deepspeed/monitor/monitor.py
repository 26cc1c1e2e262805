"""Writers of metrics."""

from __future__ import annotations

from typing import Any

from ..utils.logging import warning_once


class Monitor:
    """One that writes."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = False

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Writes none of (name, value, sample): it is not built yet, which is said once."""
        warning_once("deepspeed.monitor: events are not written yet")


class MonitorMaster(Monitor):
    """All that a config enables: none is built yet."""

    def __init__(self, monitor_config: Any = None) -> None:
        super().__init__(monitor_config)
