"""All monitors."""

from penstock.monitor.deepspeed import Monitor as Monitor
from penstock.monitor.deepspeed import MonitorMaster as MonitorMaster

from .comet import CometMonitor as CometMonitor
from .csv_monitor import csvMonitor as csvMonitor
from .tensorboard import TensorBoardMonitor as TensorBoardMonitor
from .wandb import WandbMonitor as WandbMonitor
