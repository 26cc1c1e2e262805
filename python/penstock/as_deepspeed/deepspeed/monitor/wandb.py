"""Weights & Biases."""

from penstock.monitor.deepspeed import WandbMonitor as WandbMonitor
