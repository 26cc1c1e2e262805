"""DeepSpeed's names for models with sharded parameters."""

from .config import ZeroStageEnum as ZeroStageEnum
from .mics import MiCS_Init as MiCS_Init
from .parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
from .partition_parameters import GatheredParameters as GatheredParameters
from .partition_parameters import Init as Init
from .partition_parameters import ZeroParamStatus as ZeroParamStatus
from .partition_parameters import ZeroParamType as ZeroParamType
from .partition_parameters import register_external_parameter as register_external_parameter
from .partition_parameters import unregister_external_parameter as unregister_external_parameter
from .stage3 import (
    estimate_zero3_model_states_mem_needs_all_cold,  # noqa: F401
    estimate_zero3_model_states_mem_needs_all_live,  # noqa: F401
)
from .stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs_all_cold,  # noqa: F401
    estimate_zero2_model_states_mem_needs_all_live,  # noqa: F401
)
from .tiling import TiledLinear as TiledLinear
from .tiling import TiledLinearReturnBias as TiledLinearReturnBias
from .utils import unwrap_model_for_generation as unwrap_model_for_generation
