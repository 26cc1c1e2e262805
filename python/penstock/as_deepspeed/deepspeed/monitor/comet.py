"""Comet."""

from penstock.monitor.deepspeed import CometMonitor as CometMonitor
