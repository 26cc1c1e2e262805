"""CPU Adam: one pass of ours against torch and DeepSpeed with the passes they need.

Every contestant takes a bf16 gradient, multiplies it by a clip factor, updates fp32 master weights
and moments, and leaves bf16 weights; `deepspeed kernel` alone is handed an fp32 gradient and leaves
no bf16 weights. All step the same tensors in turn, a tensor each, so that a sample lasts
milliseconds and a busy machine spoils few. The limit is the fastest of several in-place loops over
the same tensors. With one thread times are processor time, else wall time.

By default ours and the loops work on memory as the engine allocates it (huge pages where the system
grants them), the peers on torch's; --shared puts all on the engine's (16 bytes per parameter).

    python benchmarks/cpu_adam.py --library build/release/benchmarks/libpenstock_bench.so
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import measure
import torch

CLIP = 0.5  # exact in every dtype, so that all contestants see the same gradient
BYTES = {
    torch.float32: 28,
    torch.bfloat16: 20,
}  # by moment dtype; 2 + 4 + moments read, and written
BYTES_LOOP = 24  # 3 x fp32 read and written
LOOPS = ["three arrays at once", "non-temporal stores", "a KiB of each in turn"]
TENSOR_NUMEL = 10_000_000
Tensors = list[torch.Tensor]


def load(path: str) -> ctypes.CDLL:
    """The library of CMake target penstock_bench; torch must be imported first."""
    library = ctypes.CDLL(path)
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.penstock_bench_loop.argtypes = [pointer, pointer, pointer, int64, ctypes.c_int]
    library.penstock_bench_adam.argtypes = [pointer] * 5 + [
        int64,
        ctypes.c_int,
        ctypes.c_float,
        int64,
    ]
    library.penstock_bench_take.argtypes = [int64]
    library.penstock_bench_take.restype = pointer
    return library


class Memory:
    """What all contestants work on, tensor by tensor; in the engine's memory or in torch's."""

    def __init__(self, params: int, library: ctypes.CDLL | None) -> None:
        self.library = library
        numel = min(params, TENSOR_NUMEL)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(numel, generator=generator)
        grads = torch.randn(numel, generator=generator).bfloat16()
        zeros = torch.zeros(numel)
        self.count = params // numel
        self.master = self.copies(weights)
        self.exp_avg, self.exp_avg_sq = self.copies(zeros), self.copies(zeros)
        self.grad = self.copies(grads)
        self.out = self.copies(weights.bfloat16())
        self.grad_fp32 = self.copy(zeros)  # of one tensor at a time

    def copies(self, tensor: torch.Tensor) -> Tensors:
        return [self.copy(tensor) for _ in range(self.count)]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.library is None:
            return tensor.clone()
        address = self.library.penstock_bench_take(tensor.nbytes)
        memory = (ctypes.c_char * tensor.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor)


Step = Callable[[int], None]  # of one tensor


def ours(memory: Memory, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> Step:
    exp_avg, exp_avg_sq = memory.exp_avg, memory.exp_avg_sq
    if dtype == torch.bfloat16:
        exp_avg = memory.copies(exp_avg[0].to(dtype))
        exp_avg_sq = memory.copies(exp_avg_sq[0].to(dtype))
    steps = [0] * memory.count

    def step(i: int) -> None:
        steps[i] += 1
        lists = (memory.master, memory.grad, exp_avg, exp_avg_sq, memory.out)
        pointers = [tensors[i].data_ptr() for tensors in lists]
        bf16 = int(dtype == torch.bfloat16)
        library.penstock_bench_adam(*pointers, memory.master[i].numel(), bf16, CLIP, steps[i])

    return step


def loop(memory: Memory, library: ctypes.CDLL, kind: int) -> Step:
    def step(i: int) -> None:
        lists = (memory.master, memory.exp_avg, memory.exp_avg_sq)
        pointers = [tensors[i].data_ptr() for tensors in lists]
        library.penstock_bench_loop(*pointers, memory.master[i].numel(), kind)

    return step


def peer(memory: Memory, make: Callable[[Tensors], Any], first: Any, bare: bool = False) -> Step:
    """A torch-like optimizer between a cast and scale of the gradient and a cast of the weights;
    alone if bare. `first` is its step count before the first step."""
    optimizer = make(memory.master)
    moments = zip(memory.master, memory.exp_avg, memory.exp_avg_sq, strict=True)
    for master, exp_avg, exp_avg_sq in moments:
        step_count = first.clone() if isinstance(first, torch.Tensor) else first
        optimizer.state[master] = {
            "step": step_count,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }

    def step(i: int) -> None:
        master = memory.master[i]
        if not bare:
            memory.grad_fp32.copy_(memory.grad[i]).mul_(CLIP)
        master.grad = memory.grad_fp32
        optimizer.step()
        master.grad = None  # what has no gradient is not stepped
        if not bare:
            memory.out[i].copy_(master)

    return step


def peers(memory: Memory) -> dict[str, Step]:
    adamw = torch.optim.AdamW
    zero = torch.tensor(0.0)
    steps = {
        "torch fused": peer(memory, lambda p: adamw(p, fused=True), zero),
        "torch foreach": peer(memory, lambda p: adamw(p, foreach=True), zero),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 (optional peer)
    except ImportError:
        return steps

    def deepspeed(params: Tensors) -> Any:
        return DeepSpeedCPUAdam(params, weight_decay=0.01)

    steps["deepspeed"] = peer(memory, deepspeed, 0)
    steps["deepspeed kernel"] = peer(memory, deepspeed, 0, bare=True)
    return steps


def check_weights(library: ctypes.CDLL) -> dict[str, float]:
    """Relative L2 distance of the weights to those of torch fused, after three steps on 2 x 10M
    values. Ends the program where it is large."""
    found: dict[str, torch.Tensor] = {}
    for name in ["torch fused", "penstock", "torch foreach", "deepspeed"]:
        memory = Memory(2 * TENSOR_NUMEL, None)
        step = ours(memory, library) if name == "penstock" else peers(memory).get(name)
        if step is None:
            continue
        for i in [0, 1, 0, 1, 0, 1]:
            step(i)
        assert memory.out[1].equal(memory.master[1].bfloat16()), f"{name}: bf16 weights"
        found[name] = memory.master[1].double()
    base = found.pop("torch fused")
    apart = {n: float((w - base).norm() / base.norm()) for n, w in found.items()}
    for name, distance in apart.items():
        if distance > 1e-6:
            raise SystemExit(f"{name}: weights differ from torch fused by {distance:.2e}")
    return apart


def samples(
    actions: dict[str, Step], count: int, rounds: int, threads: int
) -> dict[str, list[float]]:
    """Seconds of every action on every tensor in every round; the order of actions turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(-count, rounds * count):  # one round of warm-up
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            begin = clock()
            actions[name](number % count)
            if number >= 0:
                seconds[name].append(clock() - begin)
    return seconds


@dataclass
class Result:
    params: int
    threads: int
    shared: bool
    clock: str
    load_average: float
    limit_gbps: dict[str, float] = field(default_factory=dict)  # by loop
    # By contestant: the median, and median and quartiles of its time over ours.
    mparams_per_s: dict[str, float] = field(default_factory=dict)
    over_ours: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    # By ours: part of the fastest loop's bandwidth, median and quartiles.
    of_limit: dict[str, tuple[float, float, float]] = field(default_factory=dict)


@dataclass
class Field:
    """The memory and what works on it."""

    memory: Memory
    own: dict[str, tuple[Step, torch.dtype]]
    loops: dict[str, Step]
    others: dict[str, Step]


def line_up(library: ctypes.CDLL, params: int, shared: bool) -> Field:
    memory = Memory(params, library)
    own = {"penstock": (ours(memory, library), torch.float32)}
    theirs = memory
    others: dict[str, Step] = {}
    if not shared:
        bf16 = torch.bfloat16
        own["penstock, bf16 moments"] = (ours(memory, library, bf16), bf16)
        theirs = Memory(params, None)
        others["penstock in torch's memory"] = ours(theirs, library)
    loops = {name: loop(memory, library, kind) for kind, name in enumerate(LOOPS)}
    return Field(memory, own, loops, others | peers(theirs))


def run_case(all_of: Field, threads: int, arguments: argparse.Namespace) -> Result:
    torch.set_num_threads(threads)
    own = {name: step for name, (step, _) in all_of.own.items()}
    actions = own | all_of.loops | all_of.others
    seconds = samples(actions, all_of.memory.count, arguments.rounds, threads)
    numel = all_of.memory.master[0].numel()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    clock = "processor" if threads == 1 else "wall"
    load = measure.machine()["load_average"]
    result = Result(arguments.params, threads, arguments.shared, clock, load)
    result.limit_gbps = {name: BYTES_LOOP * numel / median[name] / 1e9 for name in LOOPS}
    fastest = min(LOOPS, key=lambda name: median[name])
    for name in [*own, *all_of.others]:
        result.mparams_per_s[name] = numel / median[name] / 1e6
        result.over_ours[name] = measure.ratio(seconds[name], seconds["penstock"])
    for name, (_, dtype) in all_of.own.items():
        more_bytes = BYTES[dtype] / BYTES_LOOP
        ratios = measure.ratio(seconds[fastest], seconds[name])
        result.of_limit[name] = tuple(more_bytes * r for r in ratios)  # type: ignore[assignment]
    return result


def show(result: Result) -> None:
    memory = "one memory" if result.shared else "own memory"
    print(
        f"\n{result.params:,} parameters, {result.threads} threads, {memory}, {result.clock} time"
    )
    print(f"load average {result.load_average:.1f}")
    for name, gbps in result.limit_gbps.items():
        print(f"  in place, {name:26s} {gbps:6.1f} GB/s")
    for name, rate in result.mparams_per_s.items():
        over, low, high = result.over_ours[name]
        line = f"  {name:36s} {rate:6.0f} M/s   {over:5.2f} ({low:.2f}-{high:.2f}) x our time"
        if name in result.of_limit:
            line += "   {:.2f} ({:.2f}-{:.2f}) of the limit".format(*result.of_limit[name])
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = pathlib.Path(__file__).resolve().parent.parent
    default = root / "build" / "release" / "benchmarks" / "libpenstock_bench.so"
    parser.add_argument("--library", default=str(default), help="libpenstock_bench.so")
    parser.add_argument("--params", type=float, default=1e8, help="a multiple of 1e7")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shared", action="store_true", help="all in the engine's memory")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    arguments.params = int(arguments.params)
    library = load(arguments.library)
    apart = check_weights(library)
    print("weights apart from torch fused:", {name: f"{d:.0e}" for name, d in apart.items()})
    all_of = line_up(library, arguments.params, arguments.shared)
    cases = []
    for threads in arguments.threads:
        cases.append(run_case(all_of, threads, arguments))
        show(cases[-1])
    figures = [asdict(case) for case in cases]
    measure.write_json(
        arguments.json, {"machine": measure.machine(), "apart": apart, "cases": figures}
    )


if __name__ == "__main__":
    main()
