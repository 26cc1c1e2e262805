"""The Weights & Biases monitor."""

from penstock.monitor.deepspeed import WandbMonitor as WandbMonitor
