"""Replacing layers of a model, which is not built: they train as they are."""

from .. import _missing_name

_INSTEAD = "layers train as they are"
replace_transformer_layer = _missing_name.function("replace_transformer_layer", _INSTEAD)
revert_transformer_layer = _missing_name.function("revert_transformer_layer", _INSTEAD)
set_autotp_mode = _missing_name.function("set_autotp_mode", _missing_name.TENSOR)
