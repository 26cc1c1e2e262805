"""The section "elasticity" of a config, and its errors."""

from penstock.launch.elastic_batches import ElasticityConfig as ElasticityConfig
from penstock.launch.elastic_batches import ElasticityConfigError as ElasticityConfigError
from penstock.launch.elastic_batches import ElasticityError as ElasticityError
from penstock.launch.elastic_batches import (
    ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize,
)
