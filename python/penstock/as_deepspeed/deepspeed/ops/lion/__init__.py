"""Lion."""

from .cpu_lion import DeepSpeedCPULion as DeepSpeedCPULion
from .cpu_lion import FusedLion as FusedLion
