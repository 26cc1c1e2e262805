"""The TensorBoard monitor."""

from penstock.monitor.deepspeed import TensorBoardMonitor as TensorBoardMonitor
