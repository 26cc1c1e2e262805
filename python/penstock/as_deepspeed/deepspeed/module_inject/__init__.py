"""Replacing layers of a model, which is not built: they train as they are."""

from .. import _absent

_INSTEAD = "layers train as they are"
replace_transformer_layer = _absent.function("replace_transformer_layer", _INSTEAD)
revert_transformer_layer = _absent.function("revert_transformer_layer", _INSTEAD)
set_autotp_mode = _absent.function("set_autotp_mode", _absent.TENSOR)
