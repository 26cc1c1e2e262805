"""The formulas of the section "elasticity"."""

from penstock.launch.elastic_batches import compute_elastic_config as compute_elastic_config
from penstock.launch.elastic_batches import elasticity_enabled as elasticity_enabled
from penstock.launch.elastic_batches import (
    ensure_immutable_elastic_config as ensure_immutable_elastic_config,
)
