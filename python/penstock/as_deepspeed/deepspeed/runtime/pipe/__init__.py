"""DeepSpeed's names for pipeline parallelism."""

from .module import LayerSpec as LayerSpec
from .module import PipelineModule as PipelineModule
from .module import TiedLayerSpec as TiedLayerSpec
from .topology import ProcessTopology as ProcessTopology
