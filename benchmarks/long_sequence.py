"""The longest sequence that a small Llama trains on in so much memory per process.

    python benchmarks/long_sequence.py [--limit 4GiB] [--contestants plain recomputed ours ...]
        [--seconds 900] [--path FOLDER] [--json FILE]

One sequence, fp32, AdamW, "sdpa" attention of transformers. Contestants:

    plain        plain torch in one process
    recomputed   the same with `gradient_checkpointing_enable()`
    alst         DeepSpeed's Ulysses/ALST on two ranks, where that package can be imported: ZeRO-3,
                 its attention, tiled MLP and tiled loss, `gradient_checkpointing_enable()`
    ours         Penstock on two ranks: zero3, mesh.sequence 2, tiles of the weights and of the
                 loss, activations.checkpoint "unit", whose inputs are on disk

Every length is one try in fresh processes; it passes when `--steps` of forward, backward and update
end with finite losses. `--lengths` are tried as they are. Without them lengths double until a try
fails; when memory failed it, what lies between is halved until the two ends are 6% apart. A try
that takes more than `--seconds` has failed for "time", not "memory", and ends the search:
attention's time grows with the square of the length, so a large limit takes hours where a small one
takes minutes.

The limit is that of `max_model.py`: this process reads every rank's resident high-water mark
(VmHWM) each 20 ms and kills a try in which one is above. What the imports take is in it, and said.
A rank also resets the mark (/proc/self/clear_refs) after each phase, to say which one needs most.

glibc raises the size from which it maps memory by itself to 32 MiB when large blocks are freed, and
keeps smaller ones, in pieces that later ones do not fit. MALLOC_MMAP_THRESHOLD_ at `--mmap-bytes`
(1 MiB) hinders that, for all contestants; 0 leaves glibc as it is.

With `--check LENGTH` all contestants take their steps at that length alone, without a limit, and
their losses are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from max_model import bytes_of, high_water, progress, stop
from measure import init_group, machine, peak_bytes, write_json

POLL_S = 0.02
APART = 1.06  # where the search ends
LOSS_LIMIT = 1e-5
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RANKS = {"plain": 1, "recomputed": 1, "alst": 2, "ours": 2}
TILES = {"max_bytes": "4MiB", "loss_tokens": 256}
GIB = 2.0**30


@dataclasses.dataclass
class Try:
    """What one length did."""

    contestant: str
    length: int
    passed: bool = False
    reason: str = ""  # why not
    peak_bytes: list[int] = dataclasses.field(default_factory=list)  # by rank
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of rank 0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


# ---- in the ranks


class Reporter:
    """Appends one JSON line to the rank's file after every phase: its time and its peak."""

    def __init__(self, path: str):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed with the process
        self._begin = time.monotonic()

    def __call__(self, phase: str, **details: Any) -> None:
        line = {"phase": phase, "seconds": time.monotonic() - self._begin, "peak": peak_bytes()}
        self._file.write(json.dumps(line | details) + "\n")
        self._file.flush()
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the mark
        self._begin = time.monotonic()


def build(options: argparse.Namespace, length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow to import

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


class Plain:
    def __init__(self, model: Any, options: argparse.Namespace):
        self._model = model
        if options.contestants[0] == "recomputed":
            model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model(input_ids=tokens, labels=tokens).loss

    def value_of(self, loss: torch.Tensor) -> float:
        return float(loss.detach())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def ledger(self) -> dict[str, Any]:
        return {}


class Ours:
    def __init__(self, model: Any, options: argparse.Namespace):
        import penstock  # noqa: PLC0415 - not in the peers' memory

        tier = options.activations
        offload = {"activations": tier} | ({"path": options.path} if tier == "disk" else {})
        self._engine = penstock.initialize(
            model,
            strategy="zero3",
            precision="fp32",
            mesh={"sequence": RANKS["ours"]},
            tiling=TILES,
            activations={"checkpoint": "unit"},
            offload=offload,
            optimizer={"type": "AdamW", **ADAMW},
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._engine(input_ids=tokens, labels=tokens).loss

    def value_of(self, loss: torch.Tensor) -> float:
        return float(loss.detach())

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def ledger(self) -> dict[str, Any]:
        return dict(self._engine.ledger()["measured"])


class Tiled(torch.nn.Module):
    """A rank's part of a sequence, as DeepSpeed's tutorial has it: tiles of MLPs and of the loss.

    A forward takes tokens, positions and targets, each [1, own tokens], and gives the sum of the
    losses of its tokens."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.mlp.forward = functools.partial(self._mlp, layer.mlp)

    @staticmethod
    def _mlp(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # noqa: PLC0415

        def of_tile(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

        weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        return TiledMLP.apply(of_tile, mlp, x, math.ceil(x.shape[1] / x.shape[2]), weights)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # noqa: PLC0415
            TiledFusedLogitsLoss,
        )

        def of_tile(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.lm_head(x).flatten(0, -2).float()
            return torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum")

        hidden = self.model.model(input_ids=tokens, position_ids=positions).last_hidden_state
        tiles = math.ceil(tokens.shape[1] / TILES["loss_tokens"])
        weights = [self.model.lm_head.weight]
        loss: torch.Tensor = TiledFusedLogitsLoss.apply(
            of_tile, self.model, hidden, targets, None, tiles, weights, "sum"
        )
        return loss


class Alst:
    def __init__(self, model: Any, options: argparse.Namespace):
        import deepspeed  # noqa: PLC0415 - optional, and not in the others' memory
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # noqa: PLC0415
            UlyssesSPAttentionHF,
        )

        deepspeed.init_distributed("gloo")
        ranks = RANKS["alst"]
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=ranks,
            micro_batch_size=1,
        )
        model.gradient_checkpointing_enable()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "sequence_parallel_size": ranks,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        tiled = Tiled(model)
        optimizer = torch.optim.AdamW(tiled.parameters(), **ADAMW)
        self._engine, *_ = deepspeed.initialize(
            model=tiled, optimizer=optimizer, config=config, mpu=mpu
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        whole = tokens.shape[1]
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(whole)[None]
        own = slice(whole * rank // world, whole * (rank + 1) // world)
        loss = self._engine(tokens[:, own], positions[:, own], targets[:, own]) / (whole - 1)
        self._sum = loss.detach().clone()
        dist.all_reduce(self._sum)
        return loss * world  # gradients are averaged over ranks

    def value_of(self, loss: torch.Tensor) -> float:
        return float(self._sum)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def ledger(self) -> dict[str, Any]:
        return {}


def worker(options: argparse.Namespace) -> None:
    name, length = options.contestants[0], options.check
    rank = init_group()[0] if RANKS[name] > 1 else 0
    report = Reporter(f"{options.result}.{rank}")
    import transformers.models.llama.modeling_llama  # noqa: F401, PLC0415 - its own phase

    if name == "alst":
        import deepspeed  # noqa: F401, PLC0415
    report("import")
    trainer = {"ours": Ours, "alst": Alst}.get(name, Plain)(build(options, length), options)
    report("build")
    tokens = torch.randint(options.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    for _ in range(options.steps):
        loss = trainer.forward(tokens)
        report("forward", loss=trainer.value_of(loss))
        trainer.backward(loss)
        del loss
        report("backward")
        trainer.step()
        report("step")
    report("done", ledger=trainer.ledger())
    os._exit(0)  # no closing: the swap files are gone with the process


# ---- in the one that starts them


def start_ranks(options: argparse.Namespace, one: Try, folder: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = RANKS[one.contestant]
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world)),
            "OMP_WAIT_POLICY": "passive",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "DS_ACCELERATOR": "cpu",
        }
        if options.mmap_bytes:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(options.mmap_bytes)
        command = [sys.executable, __file__, "--contestants", one.contestant]
        command += ["--check", str(one.length), "--activations", options.activations]
        for name in ("hidden", "layers", "vocab", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--path", folder, "--result", f"{folder}/progress"]
        with open(f"{folder}/log.{rank}", "w", encoding="utf-8") as log:
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
    return ranks


def watch(options: argparse.Namespace, one: Try, ranks: list[subprocess.Popen]) -> None:
    """Until all ranks ended; sets the peaks, and the reason when it had to end them."""
    one.peak_bytes = [0] * len(ranks)
    deadline = time.monotonic() + options.seconds
    while any(rank.poll() is None for rank in ranks):
        for index, rank in enumerate(ranks):
            one.peak_bytes[index] = max(one.peak_bytes[index], high_water(rank.pid))
            if one.peak_bytes[index] > options.limit:
                one.reason = "memory"
        if not one.reason and time.monotonic() > deadline:
            one.reason = "time"
        failed = any(rank.poll() not in (None, 0) for rank in ranks)
        if one.reason or failed:
            time.sleep(0 if one.reason else 2)  # others may still say why
            return
        time.sleep(POLL_S)


def finish(options: argparse.Namespace, one: Try, folder: str) -> None:
    """Reads what the ranks reported."""
    lines = [progress(folder, rank) for rank in range(len(one.peak_bytes))]
    one.phases = lines[0]
    one.losses = [line["loss"] for line in lines[0] if "loss" in line]
    for rank, of_rank in enumerate(lines):
        peaks = [line["peak"] for line in of_rank]
        one.peak_bytes[rank] = max([one.peak_bytes[rank], *peaks])
    if not one.reason and max(one.peak_bytes) > options.limit:
        one.reason = "memory"
    if not one.reason and not all(of_rank and of_rank[-1]["phase"] == "done" for of_rank in lines):
        logs = pathlib.Path(f"{folder}/log.0").read_text(encoding="utf-8", errors="replace")
        no_memory = any(word in logs for word in ("bad_alloc", "MemoryError", "allocate memory"))
        one.reason = "memory" if no_memory else f"error: {logs[-1500:]}"
    if not one.reason and not all(math.isfinite(loss) for loss in one.losses):
        one.reason = "error: a loss is not finite"
    one.passed = not one.reason


def attempt(options: argparse.Namespace, contestant: str, length: int) -> Try:
    one = Try(contestant, length)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="long-sequence-", dir=options.path) as folder:
        ranks = start_ranks(options, one, folder)
        try:
            watch(options, one, ranks)
        finally:
            stop(ranks)
        finish(options, one, folder)
    one.seconds = time.monotonic() - begin
    show(one)
    if one.reason.startswith("error"):
        sys.exit(1)
    return one


def show(one: Try) -> None:
    peaks = " ".join(f"{peak / GIB:.2f}" for peak in one.peak_bytes)
    phases = ", ".join(
        f"{line['phase']} {line['peak'] / GIB:.2f} ({line['seconds']:.1f} s)"
        for line in one.phases
        if line["phase"] != "done"
    )
    print(
        f"{one.contestant:<11}{one.length:>8} {'passed' if one.passed else 'FAILED'} {one.reason}  "
        f"peak GiB [{peaks}]  {one.seconds:.0f} s  "
        f"losses {' '.join(f'{loss:.6f}' for loss in one.losses)}\n    peak GiB of: {phases}",
        flush=True,
    )


def search(options: argparse.Namespace, contestant: str, first: int) -> list[Try]:
    """Doubles, then halves what lies between; the last one that passed is the longest."""
    if options.lengths:
        return [attempt(options, contestant, length) for length in options.lengths]
    tries = [attempt(options, contestant, first)]
    while tries[-1].passed:
        tries.append(attempt(options, contestant, 2 * tries[-1].length))
    while tries[-1].reason == "memory" and not any(one.passed for one in tries):
        if tries[-1].length <= 64:  # the model alone is too large
            return tries
        tries.append(attempt(options, contestant, tries[-1].length // 2))
    low = max((one.length for one in tries if one.passed), default=0)
    high = min(one.length for one in tries if not one.passed)
    while low and high > APART * low and tries[-1].reason != "time":
        middle = round(math.sqrt(low * high) / 64) * 64
        if not low < middle < high:
            break
        tries.append(attempt(options, contestant, middle))
        low, high = (middle, high) if tries[-1].passed else (low, middle)
    return tries


def longest_of(tries: list[Try]) -> int:
    return max((one.length for one in tries if one.passed), default=0)


def summary(tries: dict[str, list[Try]]) -> dict[str, Any]:
    """Longest lengths, what ended their searches, and ratios to plain torch."""
    plain = longest_of(tries.get("plain", []))
    figures: dict[str, Any] = {}
    for name, of_name in tries.items():
        longest = longest_of(of_name)
        failed = sorted((one.length, one.reason) for one in of_name if not one.passed)
        figures[name] = {"longest": longest, "failed": failed}
        ratio = f", {longest / plain:.2f} of plain torch" if plain else ""
        ended = f" ({failed[0][0]}: {failed[0][1]})" if failed else ""
        print(f"{name:<11} longest {longest}{ended}{ratio}")
        if plain:
            figures[name]["ratio"] = longest / plain
    return figures


def check(options: argparse.Namespace) -> None:
    """The same losses for all; exits with an error if not."""
    options.limit = sys.maxsize
    tries = [attempt(options, name, options.check) for name in options.contestants]
    apart = max(abs(one.losses[0] - tries[0].losses[0]) for one in tries)
    print(f"first losses are {apart:.1e} apart")
    write_json(options.json, {"apart": apart, "tries": [dataclasses.asdict(one) for one in tries]})
    if apart > LOSS_LIMIT:
        sys.exit(1)


def contestants() -> list[str]:
    there = importlib.util.find_spec("deepspeed") is not None
    return [name for name in RANKS if there or name != "alst"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contestants", nargs="+", choices=RANKS, default=contestants())
    parser.add_argument("--limit", type=bytes_of, default=bytes_of("4GiB"), help="per process")
    parser.add_argument("--first", type=int, default=1024, help="length of the first try")
    parser.add_argument("--lengths", type=int, nargs="+", help="these alone, without a search")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900.0, help="for one try")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--activations", choices=("none", "host", "disk"), default="disk")
    parser.add_argument("--mmap-bytes", type=int, default=1 << 20, help="0: glibc's own")
    parser.add_argument("--check", type=int, help="compares losses at this length alone")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        worker(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # which ends the ranks
    if options.check:
        check(options)
        return
    tries = {}
    first = options.first
    for name in options.contestants:
        tries[name] = search(options, name, first)
        first = max(first, longest_of(tries[name]))  # the next one goes at least as far
    figures = {"machine": machine(), "limit": options.limit, "longest": summary(tries)}
    every = [dataclasses.asdict(one) for of_name in tries.values() for one in of_name]
    write_json(options.json, figures | {"tries": every})


if __name__ == "__main__":
    main()
