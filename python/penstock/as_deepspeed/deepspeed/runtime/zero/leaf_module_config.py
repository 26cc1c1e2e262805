"""The config's section leaf_module, which selects modules that DeepSpeed gathers as a whole."""

from __future__ import annotations

from typing import Any

from ... import _table

_Made: Any = _table.attributes(__name__)("DeepSpeedZeroLeafModuleConfig")


class DeepSpeedZeroLeafModuleConfig(_Made):  # type: ignore[misc]
    """Lists of classes, names and suffixes of names. A text is a list with one entry."""

    def __init__(self, **given: Any) -> None:
        lists = {key: [one] if isinstance(one, str) else one for key, one in given.items()}
        super().__init__(**lists)
