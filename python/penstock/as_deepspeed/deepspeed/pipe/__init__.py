"""DeepSpeed's names for pipeline parallelism."""

from ..runtime.pipe import LayerSpec as LayerSpec
from ..runtime.pipe import PipelineModule as PipelineModule
from ..runtime.pipe import ProcessTopology as ProcessTopology
from ..runtime.pipe import TiedLayerSpec as TiedLayerSpec
