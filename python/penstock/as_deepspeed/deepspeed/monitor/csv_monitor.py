"""Files of CSV."""

from penstock.monitor.deepspeed import CsvMonitor as csvMonitor

__all__ = ["csvMonitor"]
