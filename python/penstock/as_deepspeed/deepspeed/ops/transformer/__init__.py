"""DeepSpeed's own layers, which are not built."""

from ... import _absent

_INSTEAD = "use a layer of torch"
DeepSpeedTransformerConfig = _absent.cls("DeepSpeedTransformerConfig", _INSTEAD)
DeepSpeedTransformerLayer = _absent.cls("DeepSpeedTransformerLayer", _INSTEAD)
