"""Types of the config section zero_optimization."""

from typing import Any

from ... import _table

# Deprecated key -> the key that replaced it, and the value that True stands for.
_DEPRECATED: dict[str, tuple[str, Any]] = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("gather_16bit_weights_on_model_save", True),
}
_Made: Any = _table.attributes(__name__)("DeepSpeedZeroConfig")


class DeepSpeedZeroConfig(_Made):  # type: ignore[misc]
    """The section, with the values of deprecated keys under their new names."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for old, (new, value) in _DEPRECATED.items():
            if getattr(self, old):
                setattr(self, new, self._as(new, self._KEYS[new][0], value))
        if self.overlap_comm is None:
            self.overlap_comm: bool | None = self.stage == 3
