"""ZenFlow, which is not supported."""

from ... import _missing_name

_INSTEAD = "use offload.late_update (docs/config.md), which is exact"
ZenFlowCPUAdam = _missing_name.cls("ZenFlowCPUAdam", _INSTEAD)
ZenFlowSelectiveAdamW = _missing_name.cls("ZenFlowSelectiveAdamW", _INSTEAD)
