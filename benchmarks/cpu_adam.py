"""CPU Adam: one pass of ours against torch and DeepSpeed with the casts they need.

Every variant takes a bf16 gradient, multiplies it by a clip factor, updates fp32 master weights and
moments, and leaves bf16 weights. All run interleaved in one process on the same gradients; an
in-place streaming loop measured in the same rounds is the limit. Ours and the loop work on memory
as the engine allocates it (huge pages where the system grants them), the peers on torch's.

    python benchmarks/cpu_adam.py --library build/release/benchmarks/libpenstock_bench.so
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

CLIP = 0.5  # exact in every dtype, so that all variants see the same gradient
BYTES_OURS = 28  # bf16 gradient, 3 x fp32 read and written, bf16 weight
BYTES_STREAM = 24  # 3 x fp32 read and written
NUM_TENSORS = 10
Tensors = list[torch.Tensor]


def load(path: str) -> ctypes.CDLL:
    """The library of CMake target penstock_bench; torch must be imported first."""
    library = ctypes.CDLL(path)
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.penstock_bench_stream.argtypes = [pointer, pointer, pointer, int64, ctypes.c_int]
    library.penstock_bench_adam.argtypes = [pointer] * 5 + [int64, ctypes.c_float, int64]
    library.penstock_bench_take.argtypes = [int64]
    library.penstock_bench_take.restype = pointer
    return library


def in_arena(library: ctypes.CDLL, tensors: Tensors) -> Tensors:
    """Copies in the engine's own memory."""
    copies = []
    for tensor in tensors:
        address = library.penstock_bench_take(tensor.nbytes)
        memory = (ctypes.c_char * tensor.nbytes).from_address(address)
        copies.append(torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor))
    return copies


class Variant:
    """One optimizer with its own copy of the weights."""

    def __init__(self, weights: Tensors, grads: Tensors) -> None:
        self.master = [w.clone() for w in weights]
        self.out = [w.bfloat16() for w in weights]
        self.grads = grads

    def step(self) -> None:
        raise NotImplementedError


class Ours(Variant):
    def __init__(self, weights: Tensors, grads: Tensors, library: ctypes.CDLL) -> None:
        super().__init__(weights, in_arena(library, grads))
        self.library = library
        self.master = in_arena(library, weights)
        self.out = in_arena(library, self.out)
        zeros = [torch.zeros_like(w) for w in weights]
        self.exp_avg, self.exp_avg_sq = in_arena(library, zeros), in_arena(library, zeros)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for ranges in zip(
            self.master, self.grads, self.exp_avg, self.exp_avg_sq, self.out, strict=True
        ):
            pointers = [tensor.data_ptr() for tensor in ranges]
            self.library.penstock_bench_adam(*pointers, ranges[0].numel(), CLIP, self.steps)


class WithCasts(Variant):
    """A torch-like optimizer between a cast and scale of the gradient and a cast of the weights."""

    def __init__(
        self,
        weights: Tensors,
        grads: Tensors,
        make: Callable[[Tensors], torch.optim.Optimizer],
    ) -> None:
        super().__init__(weights, grads)
        self.grads_fp32 = [torch.zeros_like(master) for master in self.master]
        for master, grad in zip(self.master, self.grads_fp32, strict=True):
            master.grad = grad
        self.optimizer = make(self.master)

    def step(self) -> None:
        for wide, grad in zip(self.grads_fp32, self.grads, strict=True):
            wide.copy_(grad).mul_(CLIP)
        self.optimizer.step()
        for master, out in zip(self.master, self.out, strict=True):
            out.copy_(master)


def make_variants(weights: Tensors, grads: Tensors, library: ctypes.CDLL) -> dict[str, Variant]:
    adamw = torch.optim.AdamW
    variants: dict[str, Variant] = {
        "penstock": Ours(weights, grads, library),
        "torch_fused": WithCasts(weights, grads, lambda p: adamw(p, fused=True)),
        "torch_foreach": WithCasts(weights, grads, lambda p: adamw(p, foreach=True)),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 (optional peer)
    except ImportError:
        return variants
    variants["deepspeed"] = WithCasts(
        weights, grads, lambda p: DeepSpeedCPUAdam(p, weight_decay=0.01)
    )
    return variants


def stream(library: ctypes.CDLL, arrays: list[Tensors], non_temporal: int) -> None:
    for ranges in arrays:
        pointers = [tensor.data_ptr() for tensor in ranges]
        library.penstock_bench_stream(*pointers, ranges[0].numel(), non_temporal)


def measure(
    actions: dict[str, Callable[[], None]], rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of every action in every round after warm-up, the actions in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(warmup + rounds):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def weights_apart(variants: dict[str, Variant]) -> dict[str, float]:
    """Relative L2 distance of the master weights to those of torch_fused."""
    base = variants["torch_fused"].master

    def square(tensors: Tensors) -> float:
        return sum(float(t.double().square().sum()) for t in tensors)

    apart = {}
    for name, variant in variants.items():
        delta = [a - b for a, b in zip(variant.master, base, strict=True)]
        apart[name] = (square(delta) / square(base)) ** 0.5
    return apart


@dataclass
class Result:
    threads: int
    numel: int
    rounds: int
    median_s: dict[str, float]
    limit_gbps: float  # of the faster in-place loop
    penstock_gbps: float
    fraction_of_limit: float
    time_over_penstock: dict[str, float]
    weights_apart: dict[str, float]


def run_case(library: ctypes.CDLL, numel: int, threads: int, rounds: int) -> Result:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    per_tensor = numel // NUM_TENSORS
    weights = [torch.randn(per_tensor) for _ in range(NUM_TENSORS)]
    grads = [torch.randn(per_tensor).bfloat16() for _ in range(NUM_TENSORS)]
    variants = make_variants(weights, grads, library)
    zeros = [torch.zeros(per_tensor)] * 3
    arrays = [in_arena(library, zeros) for _ in range(NUM_TENSORS)]
    actions: dict[str, Callable[[], None]] = {
        "stream_non_temporal": lambda: stream(library, arrays, 1),
        "stream_plain": lambda: stream(library, arrays, 0),
        **{name: variant.step for name, variant in variants.items()},
    }
    seconds = measure(actions, rounds, warmup=2)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    apart = weights_apart(variants)
    for name, distance in apart.items():
        if distance > 1e-6:
            raise SystemExit(f"{name}: weights differ from torch_fused by {distance:.2e}")
    limit = (
        BYTES_STREAM
        * per_tensor
        * NUM_TENSORS
        / min(median["stream_non_temporal"], median["stream_plain"])
    )
    bandwidth = BYTES_OURS * per_tensor * NUM_TENSORS / median["penstock"]
    return Result(
        threads=threads,
        numel=numel,
        rounds=rounds,
        median_s=median,
        limit_gbps=limit / 1e9,
        penstock_gbps=bandwidth / 1e9,
        fraction_of_limit=bandwidth / limit,
        time_over_penstock={n: median[n] / median["penstock"] for n in variants},
        weights_apart=apart,
    )


def show(result: Result) -> None:
    print(f"threads {result.threads}, {result.numel:,} parameters, median of {result.rounds}")
    print(f"  limit (in-place stream)  {result.limit_gbps:6.1f} GB/s")
    print(
        f"  penstock                 {result.penstock_gbps:6.1f} GB/s"
        f" = {result.fraction_of_limit:.2f} of the limit (28 B per parameter)"
    )
    for name, seconds in result.median_s.items():
        line = f"  {name:22s} {seconds * 1e3:9.1f} ms"
        if name in result.time_over_penstock:
            line += f"  {result.time_over_penstock[name]:5.2f} x ours"
            line += f", weights apart {result.weights_apart[name]:.1e}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = pathlib.Path(__file__).resolve().parent.parent
    default = root / "build" / "release" / "benchmarks" / "libpenstock_bench.so"
    parser.add_argument("--library", default=str(default), help="libpenstock_bench.so")
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    library = load(arguments.library)
    cases = []
    for threads in arguments.threads:
        cases.append(run_case(library, arguments.numel, threads, arguments.rounds))
        show(cases[-1])
    if arguments.json:
        pathlib.Path(arguments.json).write_text(
            json.dumps([asdict(c) for c in cases], indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
