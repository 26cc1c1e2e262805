"""Encoding and decoding for lossy wires, beside memory's speed and beside torch's operations.

    python benchmarks/wire_codec.py [--library build/release/benchmarks/libpenstock_bench.so]

All take turns; figures are medians. "limit" is the time in which the in-place loop of cpu_adam.py
(x = x * a + b, the fastest of its kinds) moves the bytes that the pass must read and write. "torch"
is the same arithmetic in eager operations. "fed" encodes with a residual in bf16, which it reads
and writes. Time is wall time.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from cpu_adam import BYTES_LOOP, LOOPS, load
from measure import machine, write_json

WIRES = ("int8/128", "int8/128/stochastic", "int4/128", "int4/128/stochastic", "sign/128")
FED = ("int4/128", "sign/128")
ADDENDS = 4


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--library", default="build/release/benchmarks/libpenstock_bench.so")
    add("--millions", type=int, default=16, help="values")
    add("--rounds", type=int, default=9)
    add("--json", help="file for all figures")
    return parser.parse_args()


def library_of(path: str) -> ctypes.CDLL:
    library = load(path)
    pointer, int64, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
    library.penstock_bench_encoded_bytes.argtypes = [int64, text]
    library.penstock_bench_encoded_bytes.restype = int64
    library.penstock_bench_encode.argtypes = [pointer, pointer, number, int64, text]
    library.penstock_bench_encode_fed.argtypes = [pointer, pointer, number, int64, text, pointer]
    library.penstock_bench_decode.argtypes = [pointer, pointer, number, int64, number, text]
    return library


def signs_by_torch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scales, the packed signs, and the decoded rows."""
    scale = rows.abs().mean(1, keepdim=True)
    negative = rows < 0
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    packed = (negative.view(-1, 8).to(torch.uint8) * powers).sum(1, dtype=torch.uint8)
    return scale, packed, torch.where(negative, -scale, scale)


def fed_by_torch(values: torch.Tensor, residual: torch.Tensor, wire: str) -> None:
    rows = (values.float() + residual).view(-1, 128)
    if wire.startswith("sign"):
        decoded = signs_by_torch(rows)[2]
    else:
        scale = rows.abs().amax(1, keepdim=True) / 7.0
        codes = (rows / scale).round_().to(torch.int8)
        pairs = codes.view(-1, 2)
        _ = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
        decoded = codes * scale
    residual.copy_((rows - decoded).view(-1))


def by_torch(values: torch.Tensor, wire: str) -> tuple[torch.Tensor, ...]:
    rows = values.float().view(-1, 128)
    if wire.startswith("sign"):
        return signs_by_torch(rows)[:2]
    levels = 127.0 if wire.startswith("int8") else 7.0
    largest = rows.abs().amax(1, keepdim=True)
    scaled = rows.mul(levels / largest)
    if wire.endswith("stochastic"):
        scaled.add_(torch.rand_like(scaled)).floor_().clamp_(-levels, levels)
    else:
        scaled.round_()
    codes = scaled.to(torch.int8)
    if levels < 8:
        pairs = codes.view(-1, 2)
        codes = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return largest / levels, codes


Actions = dict[str, Callable[[], object]]


def passes(
    library: ctypes.CDLL, numel: int, dtype: torch.dtype, wire: str
) -> tuple[Actions, dict[str, int]]:
    """By name, the calls, and for ours the bytes that they must read and write."""
    values, sums = torch.randn(numel).to(dtype), torch.empty(numel, dtype=dtype)
    low, text, size = int(dtype == torch.bfloat16), wire.encode(), dtype.itemsize
    piece = library.penstock_bench_encoded_bytes(numel, text)
    room = torch.zeros(piece * ADDENDS, dtype=torch.uint8)

    def encode(index: int = 0) -> None:
        to = room.data_ptr() + index * piece
        library.penstock_bench_encode(to, values.data_ptr(), low, numel, text)

    def add_up() -> None:
        to = sums.data_ptr()
        library.penstock_bench_decode(to, room.data_ptr(), low, numel, ADDENDS, text)

    for index in range(ADDENDS):
        encode(index)
    name = f"{'bf16' if low else 'fp32'} {wire}"
    actions: Actions = {
        f"encode {name}": encode,
        f"torch encode {name}": lambda: by_torch(values, wire),
    }
    moved = {f"encode {name}": numel * size + piece}
    if wire in FED:
        residual = torch.zeros(numel, dtype=torch.bfloat16)
        actions[f"encode fed {name}"] = lambda: library.penstock_bench_encode_fed(
            room.data_ptr(), values.data_ptr(), low, numel, text, residual.data_ptr()
        )
        actions[f"torch encode fed {name}"] = lambda: fed_by_torch(values, residual, wire)
        moved[f"encode fed {name}"] = numel * (size + 4) + piece
    if not wire.endswith("stochastic"):  # decoding does not depend on the rounding
        actions[f"sum {ADDENDS} {name}"] = add_up
        moved[f"sum {ADDENDS} {name}"] = numel * size + ADDENDS * piece
    return actions, moved


def main() -> None:
    options = parse_options()
    library, numel = library_of(options.library), options.millions * 1_000_000 // 128 * 128
    arrays = [torch.rand(numel) for _ in range(3)]
    actions: Actions = {}
    for kind, name in enumerate(LOOPS):
        actions[name] = lambda kind=kind: library.penstock_bench_loop(
            *(one.data_ptr() for one in arrays), numel, kind
        )
    moved: dict[str, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for wire in WIRES:
            more, sizes = passes(library, numel, dtype, wire)
            actions |= more
            moved |= sizes
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(options.rounds + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rate = BYTES_LOOP * numel / min(median[name] for name in LOOPS)
    print(f"{torch.get_num_threads()} threads; in-place loop {rate / 1e9:.1f} GB/s")
    for name, size in moved.items():
        line = f"{name:34} {numel / median[name] / 1e9:6.2f} G values/s"
        line += f"  {size / rate / median[name]:5.2f} of the limit"
        if f"torch {name}" in median:
            line += f"  {median[f'torch {name}'] / median[name]:6.1f} x torch"
        print(line)
    write_json(options.json, {"machine": machine(), "seconds": seconds, "bytes": moved})


if __name__ == "__main__":
    main()
