"""Quantized and LoRA layers, which are not built: peft's train under every strategy."""

from .. import _absent

_INSTEAD = "use peft, whose adapters train under every strategy"
LoRAConfig = _absent.cls("deepspeed.linear.LoRAConfig", _INSTEAD)
OptimizedLinear = _absent.cls("deepspeed.linear.OptimizedLinear", _INSTEAD)
QuantizationConfig = _absent.cls("deepspeed.linear.QuantizationConfig", _INSTEAD)
