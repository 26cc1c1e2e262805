"""What a run says of itself: metrics, console, trace and report (docs/monitoring.md)."""

from penstock.monitor.monitored import Monitored
from penstock.monitor.timelines import trace

__all__ = ["Monitored", "trace"]
