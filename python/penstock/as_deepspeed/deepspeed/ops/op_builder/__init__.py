"""DeepSpeed's builders of kernels. They compile nothing; they tell which kernels exist."""

from __future__ import annotations

import types
from typing import Any, ClassVar

from penstock import ConfigError

from ..file_handle import AioHandle, PinMemoryHandle


class OpBuilder:
    """The builder of one kernel."""

    NAME: ClassVar[str] = ""
    COMPATIBLE: ClassVar[bool] = False

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.COMPATIBLE

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = True) -> Any:
        """Raises ConfigError: kernels are part of the engine and cannot be loaded separately."""
        raise ConfigError(
            f"[deepspeed] {type(self).__name__}.load(): the engine's kernels cannot be loaded "
            f"separately. Use the optimizers in deepspeed.ops or, for the disk tier, set "
            f'offload_*.device to "nvme"'
        )

    builder = jit_load = load


ALL_OPS: dict[str, type[OpBuilder]] = {}


def _builder(kind: str, name: str, there: bool = False, **loaded: Any) -> type[OpBuilder]:
    """Makes a class.

    Args:
        there: whether the engine has an equivalent kernel.
        loaded: the attributes of load()'s result; without any, load() raises ConfigError.
    """
    body: dict[str, Any] = {"NAME": name, "COMPATIBLE": there}
    if loaded:
        body["load"] = lambda self, verbose=True: types.SimpleNamespace(**loaded)
    ALL_OPS[name] = type(kind, (OpBuilder,), body)
    return ALL_OPS[name]


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", there=True, aio_handle=AioHandle)
PinMemoryBuilder = _builder(
    "PinMemoryBuilder", "pin_memory", there=True, pin_memory_handle=PinMemoryHandle
)
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", there=True)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", there=True)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", there=True)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", there=True)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", there=True)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb")
UtilsBuilder = _builder("UtilsBuilder", "utils")
GDSBuilder = _builder("GDSBuilder", "gds")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference")
TransformerBuilder = _builder("TransformerBuilder", "transformer")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn")
CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm")
ShareMemCommBuilder = _builder("ShareMemCommBuilder", "deepspeed_shm_comm")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_ops")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_device_ops")
DeepCompileBuilder = _builder("DeepCompileBuilder", "dc")
