"""TensorBoard."""

from penstock.monitor.deepspeed import TensorBoardMonitor as TensorBoardMonitor
