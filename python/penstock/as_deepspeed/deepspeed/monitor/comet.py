"""The Comet monitor."""

from penstock.monitor.deepspeed import CometMonitor as CometMonitor
