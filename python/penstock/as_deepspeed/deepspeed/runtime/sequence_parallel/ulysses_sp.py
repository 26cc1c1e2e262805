"""DeepSpeed's sequence parallelism: Penstock's are mesh.sequence, and tiling.loss_tokens."""

from ... import _absent

_TILES = "use the native key tiling.loss_tokens (docs/config.md)"
UlyssesSPAttentionHF = _absent.cls("UlyssesSPAttentionHF", _absent.SEQUENCE)
UlyssesSPAttentionHF.register_with_transformers = staticmethod(  # type: ignore[attr-defined]
    _absent.function("UlyssesSPAttentionHF.register_with_transformers", _absent.SEQUENCE)
)
UlyssesSPDataLoaderAdapter = _absent.cls("UlyssesSPDataLoaderAdapter", _absent.SEQUENCE)
SequenceTiledCompute = _absent.cls("SequenceTiledCompute", _TILES)
TiledMLP = _absent.cls("TiledMLP", _TILES)
TiledFusedLogitsLoss = _absent.cls("TiledFusedLogitsLoss", _TILES)
sequence_tiled_compute = _absent.function("sequence_tiled_compute", _TILES)
