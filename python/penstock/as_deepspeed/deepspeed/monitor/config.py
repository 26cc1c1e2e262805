"""The config sections of the monitors."""

from penstock.monitor.deepspeed_config import CometConfig as CometConfig
from penstock.monitor.deepspeed_config import CSVConfig as CSVConfig
from penstock.monitor.deepspeed_config import DeepSpeedMonitorConfig as DeepSpeedMonitorConfig
from penstock.monitor.deepspeed_config import TensorBoardConfig as TensorBoardConfig
from penstock.monitor.deepspeed_config import WandbConfig as WandbConfig
from penstock.monitor.deepspeed_config import get_monitor_config as get_monitor_config
