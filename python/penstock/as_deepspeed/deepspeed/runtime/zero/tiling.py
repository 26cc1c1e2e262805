"""Large layers in tiles: the engine's own key "tiling" does it for layers as they are."""

from ... import _missing_name

_INSTEAD = "a torch.nn.Linear is tiled by the native key tiling (docs/config.md)"
TiledLinear = _missing_name.cls("deepspeed.zero.TiledLinear", _INSTEAD)
TiledLinearReturnBias = _missing_name.cls("deepspeed.zero.TiledLinearReturnBias", _INSTEAD)
