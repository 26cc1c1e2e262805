"""DeepSpeed's names of penstock.monitor.deepspeed_flops."""

from __future__ import annotations

from typing import Any

import torch

from penstock import ConfigError
from penstock.monitor.deepspeed_flops import FlopsProfiler as FlopsProfiler


def get_model_profile(  # noqa: PLR0913 - DeepSpeed's signature
    model: torch.nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Returns the operations, multiply-adds and parameters of one call of the model.

    Sets the model to eval(). `mode`: "forward" or "generate". Raises ConfigError without input.
    """
    profiler = FlopsProfiler(model.eval())
    options = kwargs or {}
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not options:
        raise ConfigError(
            "[deepspeed::get_model_profile] no input is given: pass input_shape, args or kwargs"
        )
    call: Any = model.generate if mode == "generate" else model
    for _ in range(warm_up):
        call(*args, **options)
    profiler.start_profile(ignore_modules)
    call(*args, **options)
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return found
