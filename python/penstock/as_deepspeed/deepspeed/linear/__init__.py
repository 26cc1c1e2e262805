"""Quantized and LoRA layers, which are not supported. Those of peft train under every strategy."""

from .. import _missing_name

_INSTEAD = "use peft, whose adapters train under every strategy"
LoRAConfig = _missing_name.cls("deepspeed.linear.LoRAConfig", _INSTEAD)
OptimizedLinear = _missing_name.cls("deepspeed.linear.OptimizedLinear", _INSTEAD)
QuantizationConfig = _missing_name.cls("deepspeed.linear.QuantizationConfig", _INSTEAD)
