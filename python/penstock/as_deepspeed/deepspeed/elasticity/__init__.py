"""Batch sizes that fit many numbers of devices. DeepSpeed 0.19.8 no longer has this package."""

from . import config as config
from .elasticity import compute_elastic_config as compute_elastic_config
from .elasticity import elasticity_enabled as elasticity_enabled
from .elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config
