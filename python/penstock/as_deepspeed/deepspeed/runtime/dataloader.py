"""DeepSpeed's names for data loaders."""

from ..utils.loaders import DeepSpeedDataLoader as DeepSpeedDataLoader
from ..utils.loaders import RepeatingLoader as RepeatingLoader
