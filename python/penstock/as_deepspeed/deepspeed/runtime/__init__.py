"""The engine, its config and its optimizers."""

from . import config as config
from . import engine as engine
from . import fp16 as fp16
from . import lr_schedules as lr_schedules
from . import utils as utils
from . import zero as zero
from .base_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from .base_optimizer import ZeROOptimizer as ZeROOptimizer
