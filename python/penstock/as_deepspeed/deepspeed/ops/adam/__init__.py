"""Adam."""

from .cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from .fused_adam import FusedAdam as FusedAdam
from .zenflow import ZenFlowCPUAdam as ZenFlowCPUAdam
from .zenflow import ZenFlowSelectiveAdamW as ZenFlowSelectiveAdamW
