"""DeepSpeed's builders of kernels. They compile nothing; they tell which kernels exist."""

from __future__ import annotations

from typing import Any, ClassVar

from penstock import ConfigError


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
            f"separately: use the optimizers in deepspeed.ops, or offload_*.device nvme for the "
            f"disk tier"
        )

    builder = jit_load = load


# Name -> (class, whether the engine has an equivalent kernel).
_ALL = {
    "async_io": ("AsyncIOBuilder", True),
    "cpu_adam": ("CPUAdamBuilder", True),
    "cpu_adagrad": ("CPUAdagradBuilder", True),
    "cpu_lion": ("CPULionBuilder", True),
    "fused_adam": ("FusedAdamBuilder", True),
    "fused_lion": ("FusedLionBuilder", True),
    "fused_lamb": ("FusedLambBuilder", False),
    "utils": ("UtilsBuilder", False),
    "gds": ("GDSBuilder", False),
    "fp_quantizer": ("FPQuantizerBuilder", False),
    "quantizer": ("QuantizerBuilder", False),
    "random_ltd": ("RandomLTDBuilder", False),
    "sparse_attn": ("SparseAttnBuilder", False),
    "spatial_inference": ("SpatialInferenceBuilder", False),
    "transformer": ("TransformerBuilder", False),
    "stochastic_transformer": ("StochasticTransformerBuilder", False),
    "transformer_inference": ("InferenceBuilder", False),
    "evoformer_attn": ("EvoformerAttnBuilder", False),
    "deepspeed_ccl_comm": ("CCLCommBuilder", False),
    "deepspeed_shm_comm": ("ShareMemCommBuilder", False),
    "inference_core_ops": ("InferenceCoreBuilder", False),
    "cutlass_ops": ("InferenceCutlassBuilder", False),
    "ragged_ops": ("RaggedOpsBuilder", False),
    "ragged_device_ops": ("RaggedUtilsBuilder", False),
    "dc": ("DeepCompileBuilder", False),
}
ALL_OPS: dict[str, type[OpBuilder]] = {
    name: type(kind, (OpBuilder,), {"NAME": name, "COMPATIBLE": there})
    for name, (kind, there) in _ALL.items()
}
globals().update({kind: ALL_OPS[name] for name, (kind, _) in _ALL.items()})


def __getattr__(name: str) -> Any:
    raise AttributeError(f"deepspeed.ops.op_builder has no {name}")
