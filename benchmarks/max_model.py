"""The largest GPT that takes five steps in so much memory per process, with the rest on disk.

    python benchmarks/max_model.py [--contestant ours|deepspeed] [--limit 4GiB] [--sizes 2048x8 ...]
        [--path FOLDER] [--json FILE]

Every size (width x layers) is one try in fresh processes: the model is built in pieces
(`penstock.init(path=...)`, `deepspeed.zero.Init`), sharded over the ranks with parameters and
optimizer state on disk, and trained for five steps with AdamW on one batch per rank, in bf16 with
fp32 masters and moments. Sequences are short, since the question is state, not activations.

The limit is hard: this process reads every rank's resident high-water mark (VmHWM, which the kernel
keeps, so nothing between two looks is missed; shared pages and mapped libraries count) each 20 ms
and kills a try in which one is above the limit. RLIMIT_DATA would count what is mapped, not what is
resident: torch's threads and allocators map far more than they touch. Memory cgroups would count
the page cache too.

A try passes when every rank reports all steps with finite losses. What a rank does after its last
step (DeepSpeed's may abort at exit) does not count. Disk traffic is what the kernel counts for the
ranks (/proc/PID/io).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from measure import DEEPSPEED_AIO, init_group, machine, write_json

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

STEPS = 5
POLL_S = 0.02
LEARNING_RATE = 1e-4
# Bytes on disk per parameter, for the check before a try: parameter, master, moments and gradient;
# ours has what the construction keeps beside them.
DISK_BYTES = {"ours": 16 + 2, "deepspeed": 18}
DISK_SHARE = 0.85  # of what is free


@dataclasses.dataclass
class Try:
    """What one size did."""

    contestant: str
    size: str
    num_params: int
    passed: bool = False
    reason: str = ""  # why not
    peak_bytes: list[int] = dataclasses.field(default_factory=list)  # by rank
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of rank 0
    losses: list[float] = dataclasses.field(default_factory=list)
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    disk_gb_per_s: float = 0.0
    setup_s: float = 0.0


def sizes_of(text: str, context: int) -> GPTConfig:
    width, layers = (int(part) for part in text.split("x"))
    return GPTConfig(layers=layers, width=width, heads=max(1, width // 128), context=context)


def num_params(config: GPTConfig) -> int:
    """Exactly what `GPT(config)` has."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(config).parameters())


# ---- in the ranks


def disk_bytes() -> int:
    """Read and written by this process, below the page cache."""
    lines = pathlib.Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]) + int(fields["write_bytes"])


class Reporter:
    """Appends one JSON line to the rank's file at every event."""

    def __init__(self, path: str):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed with the process
        self._begin, self._disk = time.monotonic(), disk_bytes()

    def __call__(self, phase: str, **details: Any) -> None:
        now, disk = time.monotonic(), disk_bytes()
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
        line = {
            "phase": phase,
            "seconds": now - self._begin,
            "disk": disk - self._disk,
            "resident": int(fields["VmRSS"]) * 1024,
            "peak": int(fields["VmHWM"]) * 1024,
        }
        self._file.write(json.dumps(line | details) + "\n")
        self._file.flush()
        self._begin, self._disk = time.monotonic(), disk_bytes()


class Ours:
    def __init__(self, config: GPTConfig, path: str, report: Reporter):
        import penstock  # noqa: PLC0415

        report("imported")
        torch.set_default_dtype(torch.bfloat16)
        with penstock.init(path=path):
            model = GPT(config)
        torch.set_default_dtype(torch.float32)
        report("built")
        self._engine = penstock.initialize(
            model,
            strategy="zero3",
            precision="bf16",
            units={"modules": [Block.__name__]},
            offload={
                "optimizer": "disk",
                "params": "disk",
                "gradients": "disk",
                "window_bytes": "96MiB",
                "path": path,
            },
            optimizer={"type": "AdamW", "lr": LEARNING_RATE},
        )
        ledger = self._engine.ledger()["predicted"]["zero3"]
        report("initialized", predicted=ledger)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss)

    def ledger(self) -> dict[str, Any]:
        return dict(self._engine.ledger()["measured"])


def deepspeed_config(config: GPTConfig, path: str, ranks: int) -> dict[str, Any]:
    """Everything that has a size is as small as the largest parameter allows."""
    largest = 4 * config.width * config.width
    nvme = {"device": "nvme", "nvme_path": path, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme
            | {"buffer_count": 6, "buffer_size": largest // ranks + 4096, "max_in_cpu": 0},
            "offload_optimizer": nvme | {"buffer_count": 4},
            "sub_group_size": largest // ranks,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,
            "overlap_comm": False,
        },
        "aio": DEEPSPEED_AIO,
    }


class DeepSpeed:
    def __init__(self, config: GPTConfig, path: str, report: Reporter):
        import deepspeed  # noqa: PLC0415 - optional, and slow to import

        report("imported")
        settings = deepspeed_config(config, path, dist.get_world_size())
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = GPT(config)
        report("built")
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        report("initialized")

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss)

    def ledger(self) -> dict[str, Any]:
        return {}


def worker(options: argparse.Namespace) -> None:
    rank, _ = init_group()
    report = Reporter(f"{options.result}.{rank}")
    config = sizes_of(options.sizes[0], options.context)
    torch.manual_seed(0)
    kind = {"ours": Ours, "deepspeed": DeepSpeed}[options.contestant]
    trainer = kind(config, options.path, report)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(config.vocab, (1, config.context + 1))
    for _ in range(STEPS):
        loss = trainer.step(tokens[:, :-1], tokens[:, 1:])
        report("step", loss=loss)
    report("done", ledger=trainer.ledger())
    dist.barrier()
    os._exit(0)  # no closing: the swap files are gone with the process


# ---- in the one that starts them


def high_water(pid: int) -> int:
    """Most bytes the process ever had resident; 0 when it is gone."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def start_ranks(options: argparse.Namespace, one: Try, folder: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    ranks = []
    for rank in range(options.ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "DS_ACCELERATOR": "cpu",  # DeepSpeed compiles its operators on first use
        }
        command = [sys.executable, __file__, "--contestant", one.contestant, "--sizes", one.size]
        command += ["--context", str(options.context), "--path", folder]
        command += ["--result", f"{folder}/progress"]
        with open(f"{folder}/log.{rank}", "w", encoding="utf-8") as log:
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
    return ranks


def progress(folder: str, rank: int) -> list[dict[str, Any]]:
    path = pathlib.Path(f"{folder}/progress.{rank}")
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def watch(options: argparse.Namespace, one: Try, ranks: list[subprocess.Popen]) -> None:
    """Until all ranks ended; sets the peaks, and the reason when it had to end them."""
    one.peak_bytes = [0] * len(ranks)
    deadline = time.monotonic() + options.seconds
    while any(rank.poll() is None for rank in ranks):
        for index, rank in enumerate(ranks):
            one.peak_bytes[index] = max(one.peak_bytes[index], high_water(rank.pid))
            if one.peak_bytes[index] > options.limit:
                one.reason = f"memory: rank {index} above the limit"
        if time.monotonic() > deadline:
            one.reason = f"time: not done in {options.seconds:.0f} s"
        failed = any(rank.poll() not in (None, 0) for rank in ranks)
        if one.reason or failed:
            time.sleep(0 if one.reason else 5)  # others may still say why
            return
        time.sleep(POLL_S)


def stop(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def finish(one: Try, folder: str, ranks: int, context: int) -> None:
    """Reads what the ranks reported."""
    lines = [progress(folder, rank) for rank in range(ranks)]
    one.phases = lines[0]
    steps = [[line for line in of_rank if line["phase"] == "step"] for of_rank in lines]
    complete = all(of_rank and of_rank[-1]["phase"] == "done" for of_rank in lines)
    one.losses = [line["loss"] for line in steps[0]]
    one.setup_s = sum(line["seconds"] for line in lines[0] if line["phase"] != "step")
    if all(steps):
        timed = [of_rank[1:] or of_rank for of_rank in steps]  # the first one makes the plans
        one.step_s = statistics.median(line["seconds"] for line in timed[0])
        one.tokens_per_s = ranks * context / one.step_s
        moved = sum(line["disk"] for of_rank in timed for line in of_rank)
        one.disk_gb_per_s = moved / 1e9 / sum(line["seconds"] for line in timed[0])
    if not one.reason and not all(math.isfinite(loss) for loss in one.losses):
        one.reason = "a loss is not finite"
    if not one.reason and not complete:
        last = [of_rank[-1]["phase"] if of_rank else "start" for of_rank in lines]
        logs = pathlib.Path(f"{folder}/log.0").read_text(encoding="utf-8", errors="replace")
        one.reason = f"error after {last}: {logs[-1500:]}"
    one.passed = not one.reason


def attempt(options: argparse.Namespace, contestant: str, size: str) -> Try:
    one = Try(contestant, size, num_params(sizes_of(size, options.context)))
    need = one.num_params * DISK_BYTES[contestant]
    free = shutil.disk_usage(options.path).free
    if need > DISK_SHARE * free:
        one.reason = f"disk: {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free, not tried"
        return one
    with tempfile.TemporaryDirectory(prefix="max-model-", dir=options.path) as folder:
        ranks = start_ranks(options, one, folder)
        try:
            watch(options, one, ranks)
        finally:
            stop(ranks)
        finish(one, folder, options.ranks, options.context)
    return one


def show(one: Try) -> None:
    gib = 2.0**30
    peaks = " ".join(f"{peak / gib:.2f}" for peak in one.peak_bytes)
    print(
        f"{one.contestant:<10}{one.size:>10} {one.num_params / 1e9:7.3f}e9  "
        f"{'passed' if one.passed else 'FAILED'}  peak GiB [{peaks}]  step {one.step_s:.1f} s  "
        f"{one.tokens_per_s:.1f} tokens/s  disk {one.disk_gb_per_s:.2f} GB/s  "
        f"losses {' '.join(f'{loss:.3f}' for loss in one.losses)}  {one.reason}",
        flush=True,
    )
    for line in one.phases:
        print(
            f"    {line['phase']:<12} resident {line['resident'] / gib:.2f} peak "
            f"{line['peak'] / gib:.2f} GiB, {line['seconds']:.1f} s, {line['disk'] / 1e9:.2f} GB"
        )
        for name in ("predicted", "ledger"):
            if line.get(name):
                cells = (f"{key} {value / gib:.2f}" for key, value in line[name].items())
                print(f"        {name} GiB: {', '.join(cells)}")


def bytes_of(text: str) -> int:
    for suffix, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * unit)
    raise argparse.ArgumentTypeError(f'"{text}" is neither GiB nor MiB')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contestant", choices=("ours", "deepspeed"), help="default: both")
    parser.add_argument("--sizes", nargs="+", default=[f"2048x{n}" for n in range(8, 65, 8)])
    parser.add_argument("--limit", type=bytes_of, default=bytes_of("4GiB"), help="per process")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="tokens per rank and step")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for one try")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        worker(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # which ends the ranks
    tries: list[Try] = []
    for contestant in (options.contestant,) if options.contestant else ("deepspeed", "ours"):
        for size in options.sizes:
            tries.append(attempt(options, contestant, size))
            show(tries[-1])
            if not tries[-1].passed:
                break
    largest = {
        one.contestant: one.num_params
        for one in sorted(tries, key=lambda one: one.num_params)
        if one.passed
    }
    print("largest:", ", ".join(f"{name} {count}" for name, count in largest.items()))
    figures = {"machine": machine(), "limit": options.limit, "largest": largest}
    write_json(options.json, figures | {"tries": [dataclasses.asdict(one) for one in tries]})


if __name__ == "__main__":
    main()
