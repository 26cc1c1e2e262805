"""Adam."""

from .cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from .fused_adam import FusedAdam as FusedAdam
