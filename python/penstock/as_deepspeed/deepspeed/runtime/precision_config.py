"""The config sections bf16 and fp16 as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _table

_made = _table.attributes(__name__)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """Returns the section "bf16", or "bfloat16", as a DeepSpeedBF16Config."""
    section = param_dict.get("bf16")
    return _made("DeepSpeedBF16Config")(
        **(param_dict.get("bfloat16", {}) if section is None else section)
    )


def get_float16_config(param_dict: Mapping[str, Any]) -> Any:
    """Returns the section "fp16" as a DeepSpeedFP16Config."""
    return _made("DeepSpeedFP16Config")(**param_dict.get("fp16", {}))
