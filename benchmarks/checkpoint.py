"""Saving and loading a run's state, against the disk and against torch's own ways.

One interleaved run on two ranks, in one folder: what `fio` writes in sequence with the same bytes,
request size and O_DIRECT; Penstock's save, waited for; torch.save of the same tensors by each rank,
with fsync; torch.distributed.checkpoint.save and async_save, with fsync as it does it. Then
Penstock's load. Then a training loop: its steps alone, and while a save runs behind it.

    python benchmarks/checkpoint.py --folder /scratch [--gib 2] [--rounds 3] [--disk]

DeepSpeed's save (ZeRO-2, the same model and optimizer; fsync after it, which it lacks) is among
them where DeepSpeed is installed. With --disk the optimizer's state rests in swap files in the
folder, and the limit is what fio reads and writes at the same time; a save moves each byte twice.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import measure
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import penstock

WIDTH = 1024
STATE_BYTES = 12  # per parameter: fp32 master weights and two moments
RANKS = 2


def sequential(folder: pathlib.Path, num_bytes: int) -> float:
    """Seconds in which fio writes so many bytes to one new file, fsync included."""
    path = folder / "fio"
    path.unlink(missing_ok=True)
    command = [
        "fio", "--name=seq", f"--filename={path}", "--rw=write", "--bs=4m", "--iodepth=8",
        "--ioengine=io_uring", "--direct=1", f"--size={num_bytes}", "--end_fsync=1",
        "--fallocate=posix", "--output-format=json",
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # no io_uring for fio here
        command[command.index("--ioengine=io_uring")] = "--ioengine=libaio"
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    path.unlink()
    # fio's own start takes longer than it says it wrote.
    return min(time.perf_counter() - begin, job["runtime"] / 1000)


def mixed(folder: pathlib.Path, num_bytes: int) -> float:
    """Seconds in which fio reads so many bytes of one file and writes as many to another."""
    command = [
        "fio", "--bs=4m", "--iodepth=8", "--ioengine=io_uring", "--direct=1",
        f"--size={num_bytes}", "--output-format=json", "--name=in", "--rw=read",
        f"--filename={folder / 'fio-in'}", "--name=out", "--rw=write", "--end_fsync=1",
        "--fallocate=posix", f"--filename={folder / 'fio-out'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    (folder / "fio-out").unlink()
    return max(jobs[0]["read"]["runtime"], jobs[1]["write"]["runtime"]) / 1000


def from_disk(options: argparse.Namespace) -> None:
    """Saves of state in swap files, while nothing else runs and while training goes on."""
    rank, folder = dist.get_rank(), pathlib.Path(options.folder)
    num_bytes = int(options.gib * 2**30)
    engine = penstock.initialize(
        model_of(num_bytes),
        {
            "strategy": "zero3",
            "units": {"modules": ["Linear"]},
            "offload": {"optimizer": "disk", "path": str(folder)},
        },
    )
    engine.save(folder / "ours")
    buffers = engine.ledger()["measured"]["buffers"]
    steps_of(engine, 1)
    rows: dict[str, list[float]] = {"fio": [], "save": [], "alone": [], "beside": []}
    for i in range(options.rounds + 1):
        found = {}
        if rank == 0:
            found["fio"] = mixed(folder, num_bytes)
        measure.barrier()
        found["save"] = timed(lambda: engine.save(folder / "ours"))
        found["alone"] = steps_of(engine, 1)[0]
        engine.save(folder / "ours", tag="behind", wait=False)
        found["beside"] = steps_of(engine, 1)[0]
        engine._core.checkpoints.wait()
        for name, seconds in found.items():
            if i > 0:
                rows[name].append(seconds)
        if rank == 0:
            shutil.rmtree(folder / "ours")
        measure.barrier()
    engine.close()
    if rank == 0:
        (folder / "fio-in").unlink()
        ratios = [a / b for a, b in zip(rows["fio"], rows["save"], strict=True)]
        middle = statistics.median(rows["save"])
        print(f"{options.gib:.2f} GiB of state in swap files of {RANKS} ranks")
        print(
            f"  save {middle:.2f} s, {2 * num_bytes / middle / 1e9:.2f} GB/s read and written, "
            f"{statistics.median(ratios):.2f} of fio; in memory at most {buffers / 2**20:.1f} MiB"
        )
        for name in ("alone", "beside"):
            print(f"  step {name:<8}{statistics.median(rows[name]):8.2f} s")


def model_of(num_bytes: int) -> nn.Module:
    layers = max(1, num_bytes // STATE_BYTES // (WIDTH * WIDTH))
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


class State:
    """The same bytes as plain tensors of this rank, for torch's ways."""

    def __init__(self, num_bytes: int, rank: int) -> None:
        size = WIDTH * WIDTH
        count = num_bytes // RANKS // (4 * size)
        self.tensors = {f"rank{rank}.{i}": torch.randn(size) for i in range(count)}
        self.bytes = count * size * 4


def timed(work: Callable[[], object]) -> float:
    measure.barrier()
    begin = time.perf_counter()
    work()
    measure.barrier()
    return time.perf_counter() - begin


def torch_save(state: State, folder: pathlib.Path, rank: int) -> None:
    with open(folder / f"torch-{rank}.pt", "wb") as file:
        torch.save(state.tensors, file)
        file.flush()
        os.fsync(file.fileno())


class DeepSpeed:
    """The same model in DeepSpeed, after one step; `save()` is durable when it returns."""

    def __init__(self, num_bytes: int, rank: int) -> None:
        import deepspeed  # noqa: PLC0415 - optional, and slow to import

        model = model_of(num_bytes)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        adam = torch.optim.AdamW(model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
        self._engine.backward(self._engine(torch.randn(8, WIDTH)).square().mean())
        self._engine.step()
        self._rank = rank

    def save(self, folder: pathlib.Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="one")
        mine = list((folder / "one").glob(f"*rank_{self._rank}_*"))
        mine += (folder / "one").glob("mp_rank_*") if self._rank == 0 else []
        for path in mine:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def dcp_async(state: State, folder: pathlib.Path) -> float:
    """Seconds that the loop is blocked; returns when it is written."""
    begin = time.perf_counter()
    future = dcp.async_save(state.tensors, checkpoint_id=folder / "dcp-async")
    blocked = time.perf_counter() - begin
    future.result()
    return blocked


def steps_of(engine: penstock.Engine, count: int) -> list[float]:
    x = torch.randn(256, WIDTH)
    seconds = []
    for _ in range(count):
        measure.barrier()
        begin = time.perf_counter()
        engine.backward(engine(x).square().mean())
        engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def stall(engine: penstock.Engine, folder: pathlib.Path, rank: int) -> dict[str, float]:
    """A step alone, and one with a save behind it, which ends within it; in turns."""
    alone, beside, blocked = [], [], []
    for _ in range(6):
        alone += steps_of(engine, 1)
        measure.barrier()
        begin = time.perf_counter()
        engine.save(folder / "stall", wait=False)
        blocked.append(time.perf_counter() - begin)
        beside.append(blocked[-1] + steps_of(engine, 1)[0])
        engine._core.checkpoints.wait()
        if rank == 0:
            shutil.rmtree(folder / "stall")
        measure.barrier()
    step, with_save = statistics.median(alone), statistics.median(beside)
    return {
        "step_s": step,
        "blocked_s": statistics.median(blocked),
        "with_s": with_save,
        "slower": with_save / step - 1,
    }


def rounds_of(
    engine: penstock.Engine, state: State, folder: pathlib.Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds by way and round."""
    peer = importlib.util.find_spec("deepspeed")
    deepspeed = DeepSpeed(RANKS * state.bytes, dist.get_rank()) if peer else None
    rank = dist.get_rank()
    rows: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        rows.setdefault(name, []).append(seconds)

    for i in range(rounds + 1):
        found = {}
        if rank == 0:
            found["fio"] = sequential(folder, RANKS * state.bytes)
        measure.barrier()
        found["save"] = timed(lambda: engine.save(folder / "ours"))
        found["torch.save"] = timed(lambda: torch_save(state, folder, rank))
        found["dcp.save"] = timed(lambda: dcp.save(state.tensors, checkpoint_id=folder / "dcp"))
        found["dcp.async_save"] = timed(lambda: note("dcp blocked", dcp_async(state, folder)))
        if deepspeed is not None:
            found["DeepSpeed"] = timed(lambda: deepspeed.save(folder / "ds"))
        found["load"] = timed(lambda: engine.load(folder / "ours"))
        for name, seconds in found.items():
            if i > 0:  # the first round warms up
                note(name, seconds)
        for name in ("ours", "dcp", "dcp-async", "ds"):
            if rank == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
        (folder / f"torch-{rank}.pt").unlink()
        measure.barrier()
    return rows


def work(options: argparse.Namespace) -> None:
    rank, folder = dist.get_rank(), pathlib.Path(options.folder)
    num_bytes = int(options.gib * 2**30)
    engine = penstock.initialize(
        model_of(num_bytes), {"strategy": "zero3", "units": {"modules": ["Linear"]}}
    )
    steps_of(engine, 1)
    state = State(num_bytes, rank)
    rows = rounds_of(engine, state, folder, options.rounds)
    stalls = [stall(engine, folder, rank) for _ in range(options.stalls)]
    engine.close()
    if rank != 0:
        return
    total = RANKS * state.bytes
    print(f"{total / 2**30:.2f} GiB of state on {RANKS} ranks, medians of {options.rounds} rounds")
    for name, seconds in rows.items():
        middle = statistics.median(seconds)
        text = f"  {name:<16}{middle:8.2f} s"
        if name != "dcp blocked":
            ratios = [a / b for a, b in zip(rows["fio"], seconds, strict=True)]
            text += f"  {total / middle / 1e9:6.2f} GB/s  {statistics.median(ratios):5.2f} of fio"
        print(text)
    for name in stalls[0] if stalls else ():
        print(f"  stall: {name:<10}{statistics.median(one[name] for one in stalls):8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--gib", type=float, default=2.0, help="of state over both ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stalls", type=int, default=1, help="rounds of steps beside a save")
    parser.add_argument("--disk", action="store_true", help="of state that rests in swap files")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        if shutil.which("fio") is None:
            sys.exit("fio is not installed, and this benchmark compares with it")
        pathlib.Path(options.folder).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "penstock", "run", "--nproc", str(RANKS), *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)
    dist.init_process_group("gloo")
    (from_disk if options.disk else work)(options)
    sys.stdout.flush()
    if "deepspeed" in sys.modules:
        os._exit(0)  # its processes abort at exit on a CPU
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
