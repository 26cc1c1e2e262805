"""Tiled linear layers, which are not supported: the native key "tiling" tiles torch's layers."""

from ... import _missing_name

_INSTEAD = "use a torch.nn.Linear and the native key tiling (docs/config.md)"
TiledLinear = _missing_name.cls("deepspeed.zero.TiledLinear", _INSTEAD)
TiledLinearReturnBias = _missing_name.cls("deepspeed.zero.TiledLinearReturnBias", _INSTEAD)
