"""Sequence parallelism, which is not built yet; tiles of the loss are (the native key tiling)."""

from ... import _absent

_LATER = "sequence parallelism is not built yet"
_TILES = "use the native key tiling.loss_tokens (docs/config.md)"
UlyssesSPAttentionHF = _absent.cls("UlyssesSPAttentionHF", _LATER)
UlyssesSPAttentionHF.register_with_transformers = staticmethod(  # type: ignore[attr-defined]
    _absent.function("UlyssesSPAttentionHF.register_with_transformers", _LATER)
)
UlyssesSPDataLoaderAdapter = _absent.cls("UlyssesSPDataLoaderAdapter", _LATER)
SequenceTiledCompute = _absent.cls("SequenceTiledCompute", _TILES)
TiledMLP = _absent.cls("TiledMLP", _TILES)
TiledFusedLogitsLoss = _absent.cls("TiledFusedLogitsLoss", _TILES)
sequence_tiled_compute = _absent.function("sequence_tiled_compute", _TILES)
