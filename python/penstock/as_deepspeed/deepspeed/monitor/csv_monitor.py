"""The CSV monitor."""

from penstock.monitor.deepspeed import CsvMonitor as csvMonitor

__all__ = ["csvMonitor"]
