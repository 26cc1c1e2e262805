"""ZenFlow, which is not built."""

from ... import _absent

_INSTEAD = "use offload.late_update (docs/config.md), which is exact"
ZenFlowCPUAdam = _absent.cls("ZenFlowCPUAdam", _INSTEAD)
ZenFlowSelectiveAdamW = _absent.cls("ZenFlowSelectiveAdamW", _INSTEAD)
