"""Counts the floating point operations of a model with torch's counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


class FlopsProfiler:
    """Counts the operations between start_profile() and stop_profile()."""

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None, **_: Any) -> None:
        self.model = model
        self._mode: FlopCounterMode | None = None
        self._flops = 0

    def start_profile(self, ignore_list: Any = None) -> None:
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop_profile(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._flops = self._mode.get_total_flops()
            self._mode = None

    def end_profile(self) -> None:
        self.stop_profile()
        self._flops = 0

    def get_total_flops(self, as_string: bool = False) -> Any:
        return f"{self._flops / 1e9:.2f} G" if as_string else self._flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._flops // 2
        return f"{macs / 1e9:.2f} GMACs" if as_string else macs

    def get_total_params(self, as_string: bool = False) -> Any:
        count = sum(one.numel() for one in self.model.parameters())
        return f"{count / 1e6:.2f} M" if as_string else count

    def print_model_profile(self, profile_step: int = 1, **_: Any) -> None:
        print(
            f"step {profile_step}: params {self.get_total_params(True)}, fwd MACs "
            f"{self.get_total_macs(True)}, fwd flops {self.get_total_flops(True)}"
        )


def get_model_profile(  # noqa: PLR0913 - DeepSpeed's signature
    model: torch.nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    as_string: bool = True,
    mode: str = "forward",
    **_: Any,
) -> tuple[Any, Any, Any]:
    """Returns the operations, multiply-adds and parameters of one forward."""
    profiler = FlopsProfiler(model)
    given = [torch.ones(input_shape)] if input_shape is not None else list(args)
    profiler.start_profile()
    (model.generate if mode == "generate" else model)(*given, **(kwargs or {}))  # type: ignore[operator]
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile()
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
