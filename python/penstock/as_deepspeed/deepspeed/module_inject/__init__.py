"""Replacement of a model's layers, which is not supported: layers train unchanged."""

from .. import _missing_name

_INSTEAD = "layers train unchanged; drop the call"
replace_transformer_layer = _missing_name.function("replace_transformer_layer", _INSTEAD)
revert_transformer_layer = _missing_name.function("revert_transformer_layer", _INSTEAD)
set_autotp_mode = _missing_name.function("set_autotp_mode", _missing_name.TENSOR)
