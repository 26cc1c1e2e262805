"""Steps over a slow network, with exact and with lossy wires, beside torch's DDP and its hooks.

    sudo .venv/bin/python benchmarks/slow_network.py [--rate 1gbit] [--local 1] [--json FILE]

Makes network namespaces as nodes on this machine, joined by a bridge whose ports send at most
`--rate` (token bucket; there is no delay). Each node has its own host name and `--local` ranks. All
trainers live in the same processes, start from the same weights, see the same tokens and take
turns; ratios are taken round by round. Bytes are those that the first node's interface counted per
step, headers included. Losses are the mean over ranks and over the last steps; "gap" is the
difference to the first trainer's.

"DDP fp16" is torch's DistributedDataParallel with fp16_compress_hook (bf16's needs a GPU), and
"PowerSGD" with powerSGD_hook of rank 4 after two exact steps. The others are Penstock's: a
strategy, and the wires of gradients (g) and parameters (p) or a value of comm.codec, with one exact
step first. With the codec "local", a timed step is the mean over the `--every` steps from one outer
step to the next; `--alike` makes the same number of steps with every trainer, to compare losses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from measure import interleave, machine, ratio, read_json, run_rank, write_json
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import penstock

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

PORT, BRIDGE = 29431, "pst-slow"
# Strategy, and its wires or its codec.
OURS: dict[str, tuple[str, dict[str, str] | str]] = {
    "ddp": ("ddp", {}),
    "ddp g int8": ("ddp", {"grad": "int8"}),
    "ddp g int4": ("ddp", {"grad": "int4/64"}),
    "zero1": ("zero1", {}),
    "zero1 int8": ("zero1", "int8"),
    "zero1 1bit": ("zero1", "1bit"),
    "zero2 g int8": ("zero2", {"grad": "int8"}),
    "zero3": ("zero3", {}),
    "zero3 g p int8": ("zero3", {"grad": "int8", "param": "int8"}),
    "zero3 g p int4": ("zero3", {"grad": "int4/64", "param": "int4/64"}),
    "zero3 zero++": ("zero3", "zero++"),
    "hpz": ("hpz", {}),
    "hpz g p int8": ("hpz", {"grad": "node:int8", "param": "node:int8"}),
    "hpz zero++": ("hpz", "zero++"),
    "ddp local": ("ddp", "local"),
    "zero1 local": ("zero1", "local"),
    "zero3 local": ("zero3", "local"),
}
PEERS = ("DDP fp16", "PowerSGD")
Step = Callable[[torch.Tensor], float]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", default="1gbit", help="of each node's link, in tc's units")
    add("--nodes", type=int, default=2)
    add("--local", type=int, default=1, help="ranks of a node")
    add("--width", type=int, default=768)
    add("--layers", type=int, default=12)
    add("--context", type=int, default=128)
    add("--batch", type=int, default=1, help="sequences of a rank")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="bf16 may be slow on CPUs")
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=2, help="timed steps per trainer and round")
    add("--every", type=int, default=32, help="steps from one outer step to the next")
    add("--alike", action="store_true", help="the same number of steps with every trainer")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0, help="of weights and samples")
    add("--trainers", nargs="+", default=["ddp", "ddp g int8", "zero1", "DDP fp16"])
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.trainers:
        if name not in OURS and name not in PEERS:
            parser.error(f"unknown trainer {name!r}: {', '.join([*OURS, *PEERS])}")
    return options


# ---- in the ranks


def make_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(options.seed)
    heads = options.width // 64
    return GPT(GPTConfig(options.layers, options.width, heads, context=options.context))


def penstock_step(options: argparse.Namespace, strategy: str, wires: dict[str, str] | str) -> Step:
    comm: dict[str, Any] = {"backend": "gloo"}  # namespaces share their memory
    if wires == "local":
        comm |= {"codec": wires, "outer_every": options.every}
    elif isinstance(wires, str):
        comm |= {"codec": wires, "exact_first": 1}
    engine = penstock.initialize(
        make_model(options),
        {
            "strategy": strategy,
            "precision": options.precision,
            "optimizer": {"type": "AdamW", "lr": options.lr},
            "clip": 1.0,
            "mesh": {"node": options.nodes},
            "units": {"modules": [Block.__name__]},
            "comm": comm,
            "table": {"wire": wires} if isinstance(wires, dict) and wires else {},
        },
    )

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def ddp_step(options: argparse.Namespace, name: str) -> Step:
    """fp32 weights; bf16 by autocast."""
    ddp = DistributedDataParallel(make_model(options))
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    adam = torch.optim.AdamW(ddp.parameters(), lr=options.lr, fused=True)

    def step(tokens: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = ddp(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return loss.item()

    return step


def text() -> torch.Tensor:
    """The sources of Python's standard library, as bytes."""
    folder = pathlib.Path(os.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()


class Run:
    """One trainer: the steps it made, and what the node's interface sent in them."""

    def __init__(self, name: str, options: argparse.Namespace, data: torch.Tensor):
        self._options, self._data = options, data
        if name in OURS:
            self._step = penstock_step(options, *OURS[name])
        else:
            self._step = ddp_step(options, name)
        self.losses: list[float] = []
        self.bytes: list[float] = []
        # Of one timed step.
        self.repeats = options.every if name.endswith(" local") and not options.alike else 1

    def step(self) -> None:
        before = sent_bytes()
        for _ in range(self.repeats):
            self._one()
        self.bytes.append((sent_bytes() - before) / self.repeats)

    def _one(self) -> None:
        options, rank = self._options, dist.get_rank()
        number = options.seed * 1_000_000 + len(self.losses)
        draw = torch.Generator().manual_seed(number * dist.get_world_size() + rank)
        starts = torch.randint(
            len(self._data) - options.context - 1, (options.batch,), generator=draw
        )
        tokens = torch.stack([self._data[at : at + options.context + 1] for at in starts])
        self.losses.append(self._step(tokens))


def mean_of(losses: list[float]) -> list[float]:
    """Over ranks. Trainers do not wait for this while they run."""
    values = torch.tensor(losses)
    dist.all_reduce(values)
    return (values / dist.get_world_size()).tolist()


def sent_bytes() -> int:
    name = os.environ["GLOO_SOCKET_IFNAME"]
    counter = pathlib.Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return int(counter.read_text(encoding="ascii"))


def worker(options: argparse.Namespace) -> dict[str, Any]:
    data = text()
    runs = {name: Run(name, options, data) for name in options.trainers}
    actions = {name: run.step for name, run in runs.items()}
    seconds = interleave(actions, options.rounds, options.steps)
    for name, run in runs.items():
        seconds[name] = [one / run.repeats for one in seconds[name]]
    return {
        "seconds": seconds,
        "losses": {name: mean_of(run.losses) for name, run in runs.items()},
        "bytes": {name: run.bytes for name, run in runs.items()},
        "parameters": sum(p.numel() for p in make_model(options).parameters()),
    }


# ---- in the one that starts them


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def nodes(count: int, rate: str) -> Iterator[list[str]]:
    """The namespaces of the nodes; they are removed at the end."""
    names = [f"{BRIDGE}-{i}" for i in range(count)]
    try:
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "link", "set", BRIDGE, "up")
        for i, name in enumerate(names):
            call("ip", "netns", "add", name)
            call(
                *("ip", "link", "add", f"{BRIDGE}{i}", "type", "veth"),
                *("peer", "name", "pst0", "netns", name),
            )
            call("ip", "link", "set", f"{BRIDGE}{i}", "master", BRIDGE, "up")
            call("ip", "-n", name, "addr", "add", f"10.231.78.{i + 1}/24", "dev", "pst0")
            for link in ("lo", "pst0"):
                call("ip", "-n", name, "link", "set", link, "up")
            call(
                *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "pst0", "root"),
                *("tbf", "rate", rate, "burst", "512kb", "latency", "20ms"),
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def run_nodes(options: argparse.Namespace) -> Any:
    """What rank 0 found."""
    world = options.nodes * options.local
    cores = len(os.sched_getaffinity(0))
    with (
        nodes(options.nodes, options.rate) as names,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        result = pathlib.Path(folder) / "result.json"
        ranks = []
        for rank in range(world):
            name = names[rank // options.local]
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % options.local),
                "LOCAL_WORLD_SIZE": str(options.local),
                "MASTER_ADDR": "10.231.78.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "pst0",
                "OMP_NUM_THREADS": str(max(1, cores // world)),
                "OMP_WAIT_POLICY": "passive",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            program = [sys.executable, *sys.argv, "--worker", "--result", str(result)]
            as_host = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            words = ["ip", "netns", "exec", name, *as_host, *program]
            process = subprocess.Popen(words, env=dict(os.environ) | environment)
            stack.callback(end, process)
            ranks.append(process)
        for rank, process in enumerate(ranks):
            if process.wait() != 0:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}")
        return read_json(str(result))


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    size = figures["parameters"]
    print(f"{size / 1e6:.1f}M parameters, {options.nodes} x {options.local} ranks, {options.rate}")
    first = options.trainers[0]
    for name in options.trainers:
        seconds, sent = figures["seconds"][name], statistics.median(figures["bytes"][name])
        times = ratio(figures["seconds"][first], seconds)[0]
        losses = figures["losses"]
        last = max(1, len(losses[name]) // 3)
        mean, other = (statistics.mean(losses[one][-last:]) for one in (name, first))
        gap = f"gap {100 * (mean / other - 1):+.2f} %"
        alike = len(losses[name]) == len(losses[first])
        print(
            f"{name:>16}  {statistics.median(seconds):7.3f} s  {times:5.2f} x {first}  "
            f"{sent / 1e6:8.1f} MB  {sent / size:5.2f} B/parameter  "
            f"loss {mean:.4f}  {gap if alike else 'other number of steps'}"
        )


def main() -> None:
    options = parse_options()
    if options.worker:
        return run_rank(worker, options)
    if os.geteuid() != 0:
        sys.exit("slow_network: network namespaces need root")
    figures = run_nodes(options)
    report(figures, options)
    write_json(options.json, {"machine": machine(), "options": vars(options), **figures})
    return None


if __name__ == "__main__":
    main()
