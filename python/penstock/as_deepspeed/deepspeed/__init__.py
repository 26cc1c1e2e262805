"""DeepSpeed's names over Penstock's engine. docs/deepspeed.md describes their translation."""

import argparse as _argparse

from . import _table, git_version_info
from . import comm as comm
from ._initialize import initialize as initialize
from .inference.engine import InferenceEngine as InferenceEngine
from .inference.engine import init_inference as init_inference
from .runtime.base_optimizer import ZeROOptimizer as ZeROOptimizer
from .runtime.compiler import is_compile_supported as is_compile_supported
from .runtime.engine import ADAM_OPTIMIZER as ADAM_OPTIMIZER
from .runtime.engine import LAMB_OPTIMIZER as LAMB_OPTIMIZER
from .runtime.lr_schedules import add_tuning_arguments as add_tuning_arguments

__version__ = version = git_version_info.version
__version_major__, __version_minor__, __version_patch__ = (
    int(part) for part in version.partition("+")[0].split(".")
)
__git_hash__, __git_branch__ = git_version_info.git_hash, git_version_info.git_branch
dist = comm


def add_config_arguments(parser: _argparse.ArgumentParser) -> _argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="read by the script")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON config")
    group.add_argument("--deepscale", default=False, action="store_true", help="old name")
    group.add_argument("--deepscale_config", default=None, type=str, help="old name")
    return parser


__getattr__ = _table.attributes(__name__)
