"""Counts the floating point operations of a model by module, and prints them as DeepSpeed does."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _scaled(number: float, unit: str = "", digits: int = 2) -> str:
    """Returns the number with a prefix: 2500 -> "2.5 K"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{round(number / size, digits):g} {prefix}{unit}"
    return f"{round(number, digits):g} {unit}".rstrip()


def _seconds(duration: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if duration > size:
            return f"{round(duration / size, 2):g} {unit}"
    return f"{round(duration * 1e6, 2):g} us"


class FlopsProfiler:
    """Counts the operations between start_profile() and stop_profile(), by module.

    Attributes:
        flops, macs, params, duration: totals; the duration is the forward's, in seconds.
    """

    def __init__(
        self, model: torch.nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.started = False
        self._mode: FlopCounterMode | None = None
        self._hooks: list[Any] = []
        self.reset_profile()

    def reset_profile(self) -> None:
        self._flops: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self.flops, self.macs, self.duration = 0, 0, 0.0
        self.params = sum(one.numel() for one in self.model.parameters())

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begins to count. Modules whose type is in `ignore_list` have no row of their own."""
        self.stop_profile()
        self.reset_profile()
        since: dict[str, float] = {}
        for name, module in self.model.named_modules():
            if type(module) in (ignore_list or ()):
                continue

            def begin(_: Any, __: Any, name: str = name) -> None:
                since[name] = time.perf_counter()

            def end(_: Any, __: Any, ___: Any, name: str = name) -> None:
                spent = time.perf_counter() - since[name]
                self._times[name] = self._times.get(name, 0.0) + spent

            self._hooks += [
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(end),
            ]
        self.started = True
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop_profile(self) -> None:
        """Ends counting. What was counted stays until end_profile()."""
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.flops = self._mode.get_total_flops()
        root = type(self.model).__name__
        for name, counts in self._mode.get_flop_counts().items():
            if name == root or name.startswith(f"{root}."):
                self._flops[name[len(root) + 1 :]] = sum(counts.values())
        self._mode = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.macs, self.duration = self.flops // 2, self._times.get("", 0.0)

    def end_profile(self) -> None:
        self.stop_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        self.stop_profile()
        return _scaled(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        self.stop_profile()
        return _scaled(self.macs, "MACs") if as_string else self.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        self.stop_profile()
        return _seconds(self.duration) if as_string else self.duration

    def get_total_params(self, as_string: bool = False) -> Any:
        return _scaled(self.params) if as_string else self.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints totals, sums by class and depth, and with `detailed` each module.

        Args:
            module_depth: the deepest level of the sums; -1: all.
            top_modules: number of classes at each level.
            output_file: where to write instead of stdout.
        """
        self.stop_profile()
        if not self.started:
            return
        with contextlib.ExitStack() as stack:
            if output_file:
                os.makedirs(os.path.dirname(os.path.abspath(output_file)), exist_ok=True)
                to = stack.enter_context(open(output_file, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(to))
            print(f"\n{' DeepSpeed Flops Profiler ':-^76}\nProfile Summary at step {profile_step}:")
            for name, value in self._summary():
                print(f"{name + ':':<60}  {value}")
            print(f"\n{' Aggregated Profile per GPU ':-^86}")
            self.print_model_aggregated_profile(module_depth, top_modules)
            if detailed:
                print(f"\n{' Detailed Profile per GPU ':-^86}")
                print("Each module: params, MACs, fwd latency (with shares of the total), FLOPS")
                self._print_modules()
            print("-" * 78)

    def _summary(self) -> list[tuple[str, Any]]:
        rows: list[tuple[str, Any]] = []
        engine = self.ds_engine
        if engine is not None:
            data = engine.dp_world_size
            rows += [
                ("world size", engine.world_size),
                ("data parallel size", engine.seq_dp_world_size if data is None else data),
                ("model parallel size", engine.mp_world_size),
                ("batch size per GPU", engine.train_micro_batch_size_per_gpu()),
            ]
        rows += [
            ("params per GPU", _scaled(self.params)),
            ("fwd MACs per GPU", _scaled(self.macs, "MACs")),
            ("fwd flops per GPU", _scaled(self.flops)),
            ("fwd latency", _seconds(self.duration)),
            ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", self._rate(self.flops, "")),
        ]
        return rows

    def _rate(self, flops: int, name: str) -> str:
        spent = self._times.get(name, 0.0)
        return _scaled(flops / spent if spent else 0.0, "FLOPS")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes with most parameters, MACs and time, by depth in the model."""
        levels: dict[int, dict[str, list[float]]] = {}
        for name, module in self.model.named_modules():
            sums = levels.setdefault(name.count(".") + 1 if name else 0, {})
            row = sums.setdefault(type(module).__name__, [0, 0, 0.0])
            row[0] += sum(one.numel() for one in module.parameters())
            row[1] += self._flops.get(name, 0) // 2
            row[2] += self._times.get(name, 0.0)
        print(f"Top {top_modules} modules in terms of params, MACs or fwd latency at model depths:")
        for depth in range(len(levels) if module_depth < 0 else min(module_depth, len(levels))):
            print(f"depth {depth}:")
            shows: Any = (_scaled, lambda one: _scaled(one, "MACs"), _seconds)
            for column, (title, show) in enumerate(
                zip(("params     ", "MACs       ", "fwd latency"), shows, strict=True)
            ):
                first = sorted(levels[depth].items(), key=lambda one: -one[1][column])
                print(f"    {title} - { {k: show(v[column]) for k, v in first[:top_modules]} }")

    def _print_modules(self) -> None:
        for name, module in self.model.named_modules():
            params = sum(one.numel() for one in module.parameters())
            flops, spent = self._flops.get(name, 0), self._times.get(name, 0.0)
            cells = (
                f"{_scaled(params)} = {100 * params / max(self.params, 1):.4g}% Params",
                f"{_scaled(flops // 2, 'MACs')} = {100 * flops / max(self.flops, 1):.4g}% MACs",
                f"{_seconds(spent)} = {100 * spent / (self.duration or 1):.4g}% latency",
                self._rate(flops, name),
            )
            depth = name.count(".") + 1 if name else 0
            label = f"({name.rpartition('.')[2]}): " if name else ""
            print(f"{'  ' * depth}{label}{type(module).__name__}({', '.join(cells)})")
