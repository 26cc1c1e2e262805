"""DeepSpeed's own layers, which are not supported."""

from ... import _missing_name

_INSTEAD = "use a layer of torch"
DeepSpeedTransformerConfig = _missing_name.cls("DeepSpeedTransformerConfig", _INSTEAD)
DeepSpeedTransformerLayer = _missing_name.cls("DeepSpeedTransformerLayer", _INSTEAD)
