"""The logger of collectives that scripts call through deepspeed.comm.

The engine's own exchanges are not among them; `penstock status` shows those.
"""

from __future__ import annotations

import datetime
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock._native import ConfigError

_COLUMNS = ("Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)")
_WAITS = ("Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)")


def _print_first(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Returns the mean without that share of the values at each end; 0 without data."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ConfigError(
            f"[deepspeed::trim_mean] trim_percent is {trim_percent}; allowed: a fraction from 0 "
            f"to 1"
        )
    left_out = round(len(data) * trim_percent)
    kept = sorted(data)[left_out : len(data) - left_out]
    return sum(kept) / len(kept) if kept else 0


def convert_size(size_bytes: int) -> str:
    """Returns the size with a unit: 1536 -> "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**power, 2)} {('B', 'KB', 'MB', 'GB', 'TB', 'PB')[power]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Returns the bandwidths of algorithm and bus in Gbit/s, from bytes and milliseconds."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    moved = size * ranks if comm_op.startswith(("all_gather", "reduce_scatter")) else size
    other = (ranks - 1) / ranks
    reduced = "all_reduce" in comm_op
    shared = reduced or moved != size or comm_op.startswith("all_to_all")
    share = other * (2 if reduced else 1) if shared else 1.0
    rate = moved / max(duration, 1e-9) * 8 / 1e6
    return rate * (2 if reduced else 1), rate * share


class CommsLogger:
    """Records times of collectives by name and message size.

    Attributes:
        comms_dict: name -> bytes of a message -> [count, milliseconds, Gbit/s, Gbit/s of the bus].
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all, self.prof_ops = True, list[str]()

    def configure(self, comms_config: Any) -> None:
        """Takes the settings of a section comms_logger, or of a config that has one."""
        section = getattr(comms_config, "comms_logger", comms_config)
        for key in ("enabled", "verbose", "debug", "prof_all", "prof_ops"):
            setattr(self, key, getattr(section, key))

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = list({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = [one for one in self.prof_ops if one not in op_name_list]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Adds a call that took `latency` milliseconds."""
        rates = calc_bw_log(raw_name, msg_size, latency)
        kept = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        kept[0] += 1
        for values, value in zip(kept[1:], (latency, *rates), strict=True):
            values.append(value)
        if self.verbose:
            _print_first(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: "
                f"{convert_size(msg_size)} | algbw (Gbps): {rates[0]:.2f} | busbw (Gbps): "
                f"{rates[1]:.2f}"
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return dict(self.comms_dict)

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(kept[0] for sizes in self.comms_dict.values() for kept in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Returns counts, times and rates by message size, or None for a name without records."""
        if operation_name not in self.comms_dict:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(times),
                "avg_latency_ms": trim_mean(times, 0.1),
                "tput_avg_gbps": trim_mean(rates, 0.1),
                "busbw_avg_gbps": trim_mean(of_bus, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, times, rates, of_bus) in sorted(
                self.comms_dict[operation_name].items()
            )
        }

    def _waits(self, name: str) -> dict[int, dict[str, Any]]:
        """Splits times into two parts: the shortest time of all ranks, and the excess over it. All
        ranks call it."""
        found = {}
        for size, (count, times, *_) in sorted(self.comms_dict[name].items()):
            own = torch.tensor(times)
            least = own.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            rest = own - least
            found[size] = {
                "count": count,
                "total_comm_lat_ms": float(least.sum()),
                "total_straggler_ms": float(rest.sum()),
                "avg_comm_lat_ms": trim_mean(least.tolist(), 0.1),
                "avg_straggler_ms": trim_mean(rest.tolist(), 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
        return found

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Prints the records as a table, and returns them if `return_dict` is set.

        With `show_straggler` a second table has the times that ranks waited for the slowest one;
        all ranks must call it then.
        """
        summary: dict[str, Any] = {one: self.get_operation_summary(one) for one in self.comms_dict}
        waits = {one: self._waits(one) for one in self.comms_dict} if show_straggler else None
        if print_log:
            _print_table((*_COLUMNS, "busbw_avg (Gbps)"), summary)
        if print_log and waits is not None:
            print("Breakdown with straggler effect")
            _print_table((*_WAITS, "Avg straggler(ms)"), waits)
        alone = not dist.is_initialized()
        about = {
            "world_size": 1 if alone else dist.get_world_size(),
            "rank": 0 if alone else dist.get_rank(),
            "timestamp": datetime.datetime.now().isoformat(),
        }
        found = {"summary": summary, "straggler_analysis": waits, "metadata": about}
        return found if return_dict else None


def _print_table(columns: Sequence[str], records: dict[str, dict[int, dict[str, Any]]]) -> None:
    print("".join(f"{one: <20}" for one in ("Comm. Op", *columns)))
    for name, sizes in records.items():
        print(name)
        for size, values in sizes.items():
            count, *numbers = list(values.values())[:5]
            cells = [" ", convert_size(size), str(count), *(f"{one:.2f}" for one in numbers)]
            print("".join(f"{one: <20}" for one in cells))


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes_of(one) for one in value)
    value = getattr(value, "tensor", value)  # the tensor of a P2POp
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def timed(logger: CommsLogger, function: Callable[..., Any], sent: int = 0) -> Callable[..., Any]:
    """Wraps the function, so that its calls are recorded as the logger's settings say.

    Args:
        sent: position of the argument that is sent.
    """
    name = function.__name__

    @functools.wraps(function)
    def run(
        *args: Any, prof: bool = False, log_name: str = name, debug: Any = None, **options: Any
    ) -> Any:
        asked = logger.enabled and (prof or logger.prof_all or log_name in logger.prof_ops)
        if not asked:
            return function(*args, **options)
        since = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            given = args[sent] if len(args) > sent else options.get("tensor")
            logger.append(name, log_name, (time.perf_counter() - since) * 1e3, _bytes_of(given))

    return run
