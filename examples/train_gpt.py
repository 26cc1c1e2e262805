"""Trains a GPT on bytes of text, sharded over any number of ranks.

    python -m penstock run --nproc 2 examples/train_gpt.py --demo
    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero2 --steps 1000
    python examples/train_gpt.py --data book.txt

The text is the Python standard library's own source unless --data names a file or a folder. A
twentieth of it is kept for validation: in a folder, some files, chosen by a hash of their names; in
a single file (or very few), the end. All windows of a step come from one random stream that the
ranks divide, so runs with the same batch x ranks see the same data.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
import time

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig

import penstock
from penstock.monitor import report

DEMO = {"steps": 300, "minutes": 2.5, "monitor": "build/demo"}
DISK_STEPS = 5
VALIDATION_SHARE = 0.05
VALIDATION_WINDOWS = 512  # over all ranks
SAMPLE_BYTES = 200
TEMPERATURE = 0.8


# ---- options


def default_precision() -> str:
    """Returns bf16 if the processor can multiply it, else fp32, which is then faster."""
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if has.get("amx_bf16") or has.get("avx512_bf16") else "fp32"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--demo", action="store_true", help=f"short run, stops after {DEMO['minutes']:g} minutes")
    add("--strategy", default="zero3", help="ddp, zero1, zero2, zero3 (default), hpz or mics")
    add(
        "--precision",
        default=default_precision(),
        help="fp32, bf16 or fp16 (default: bf16 if the processor can multiply it)",
    )
    add("--steps", type=int, default=1000)
    add("--minutes", type=float, help="stop training after this time")
    add("--batch", type=int, default=8, help="windows per rank")
    add("--seq", type=int, default=128, help="bytes per window")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=448, help="a multiple of 64, the width of a head")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--data", type=pathlib.Path, help="text: a file or a folder")
    add("--config", help="Penstock config, JSON text or path; its keys replace the options")
    add("--checkpoint", metavar="DIR", help="save checkpoints there; resume from the newest")
    add("--monitor", metavar="DIR", help="write metrics, a trace and report.html there")
    add("--machine", metavar="FILE", help="output of penstock bench, to predict seconds")
    add("--save-every", type=int, default=50, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10, metavar="STEPS")
    known, _ = parser.parse_known_args()
    if known.demo:
        parser.set_defaults(**DEMO)
    return parser.parse_args()


def make_config(options: argparse.Namespace) -> dict:
    config = {
        "strategy": options.strategy,
        "precision": options.precision,
        "optimizer": {
            "type": "AdamW",
            "lr": options.lr,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
        },
        "schedule": {
            "type": "cosine",
            "warmup_steps": min(50, options.steps // 5),
            "total_steps": options.steps,
            "min_ratio": 0.1,
        },
        "batch": {"micro": options.batch},
        "clip": 1.0,
        "prefetch_bytes": 4 << 20,  # the default would hold all of this small model
        "seed": options.seed,
        "checkpoint": {"path": options.checkpoint or "", "keep": 2},
    }
    if options.monitor:
        config["monitor"] = {"path": options.monitor, "trace_first": 10, "trace_steps": 2}
        config["monitor"]["machine"] = options.machine or ""
    if options.config is None:
        return config
    text = options.config
    if not text.lstrip().startswith("{"):
        text = pathlib.Path(text).read_text(encoding="utf-8")
    return config | json.loads(text)


# ---- ranks


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This rank and the number of ranks, from the variables that launchers set."""

    rank: int = int(os.environ.get("RANK", "0"))
    size: int = int(os.environ.get("WORLD_SIZE", "1"))

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            print(text, flush=True)

    def mean(self, *values: float) -> list[float]:
        """Returns the means over all ranks, equal on each rank. All ranks call it."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums / self.size).tolist()


# ---- data


def cut(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    train = len(text) - int(len(text) * VALIDATION_SHARE)
    return text[:train], text[train:]


def read_folder(root: pathlib.Path, pattern: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob(pattern)):
        if "site-packages" in path.parts or not path.is_file():
            continue
        text = path.read_bytes()
        if b"\0" in text:
            continue  # not text
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32
        parts[held_out].append(text)
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(part) + b"\n"), dtype=torch.uint8) for part in parts
    )
    return (train, validation) if len(validation) > 1 else cut(train)


def read_text(data: pathlib.Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes for training and for validation, uint8."""
    if data is None:
        return read_folder(pathlib.Path(sysconfig.get_paths()["stdlib"]), "*.py")
    if data.is_dir():
        return read_folder(data, "*")
    if not data.is_file():
        raise SystemExit(f"--data {data}: no such file or folder")
    return cut(torch.from_file(str(data), size=data.stat().st_size, dtype=torch.uint8))  # mapped


class Windows:
    """Random windows of a text: inputs and the bytes that follow each, int64 [batch, seq]."""

    def __init__(self, text: torch.Tensor, options: argparse.Namespace, ranks: Ranks, seed: int):
        if len(text) <= options.seq + 1:
            raise SystemExit(f"a text of {len(text)} bytes is too short for --seq {options.seq}")
        self._text, self._ranks = text, ranks
        self._batch, self._seq = options.batch, options.seq
        self._seed, self._drawn = seed, 0  # windows drawn by all ranks
        self._random = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the windows that were drawn, by any number of ranks."""
        self._random.manual_seed(self._seed)
        self._drawn = state["drawn"]
        torch.randint(len(self._text) - self._seq, (self._drawn, 1), generator=self._random)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        of_all_ranks = (self._batch * self._ranks.size, 1)
        starts = torch.randint(len(self._text) - self._seq, of_all_ranks, generator=self._random)
        self._drawn += len(starts)
        own = starts[self._ranks.rank :: self._ranks.size]
        window = self._text[own + torch.arange(self._seq + 1)].long()
        return window[:, :-1], window[:, 1:]


# ---- output


class Log:
    """One line per interval and, on a terminal, a bar below it. Prints on rank 0 only."""

    def __init__(self, ranks: Ranks, options: argparse.Namespace):
        self._ranks, self._steps = ranks, options.steps
        self._bar = ranks.rank == 0 and sys.stdout.isatty()
        ranks.say(
            f"{'step':>6}{'loss':>9}{'grad norm':>11}{'lr':>10}{'tokens/s':>10}{'RSS MiB':>9}"
        )

    def bar(self, step: int) -> None:
        if self._bar:
            done = 40 * step // self._steps
            print(f"\r[{'#' * done:<40}] {step}/{self._steps} ", end="", flush=True)

    def line(self, step: int, loss: float, grad_norm: float, lr: float, speed: float) -> None:
        clear = "\r\033[K" if self._bar else ""
        self._ranks.say(
            f"{clear}{step:>6}{loss:>9.4f}{grad_norm:>11.3f}{lr:>10.2e}{speed:>10.0f}"
            f"{resident_mib():>9.0f}"
        )
        self.bar(step)

    def close(self) -> None:
        if self._bar:
            print("\r\033[K", end="", flush=True)


def resident_mib() -> float:
    """Memory of this process that is in RAM, in MiB (Linux)."""
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---- training


def train(
    engine: penstock.Engine, windows: Windows, options: argparse.Namespace, ranks: Ranks
) -> float:
    """Trains for --steps or --minutes, whichever ends first. Returns the seconds."""
    log = Log(ranks, options)
    start = last = time.perf_counter()
    losses: list[torch.Tensor] = []
    step = engine.steps  # from a checkpoint, or 0
    while step < options.steps:
        inputs, targets = windows.next()
        loss = engine(inputs, targets)
        engine.backward(loss)
        losses.append(loss.detach())
        lr = engine.lr
        if not engine.step():  # within an accumulation window
            continue
        step += 1
        log.bar(step)
        if options.checkpoint and step % options.save_every == 0:
            engine.save(wait=False)
        if step % options.log_every and step < options.steps:
            continue
        now = time.perf_counter()
        late = options.minutes is not None and now - start > 60 * options.minutes
        loss_mean, late_share = ranks.mean(float(torch.stack(losses).mean()), float(late))
        speed = len(losses) * inputs.numel() * ranks.size / (now - last)
        log.line(step, loss_mean, engine.grad_norm, lr, speed)
        losses.clear()
        last = now
        if late_share > 0:
            break
    log.close()
    return time.perf_counter() - start


def validate(
    engine: penstock.Engine, windows: Windows, options: argparse.Namespace, ranks: Ranks
) -> tuple[float, int]:
    """Returns the mean loss in nats per byte over fixed windows, and the number of bytes."""
    rounds = max(1, VALIDATION_WINDOWS // (options.batch * ranks.size))
    engine.eval()
    with torch.no_grad():
        losses = [engine(*windows.next()) for _ in range(rounds)]
    engine.train()
    (loss,) = ranks.mean(float(torch.stack(losses).mean()))
    return loss, rounds * options.batch * ranks.size * options.seq


def sample(engine: penstock.Engine, prompt: bytes, options: argparse.Namespace) -> str:
    """Returns the model's text after the prompt. All ranks call it and draw the same bytes."""
    random = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([list(prompt)])
    engine.eval()
    with torch.no_grad():
        for _ in range(SAMPLE_BYTES):
            scores = engine(text[:, -options.seq :])[0, -1].float()
            chances = torch.softmax(scores / TEMPERATURE, dim=0)
            chosen = torch.multinomial(chances, 1, generator=random)
            text = torch.cat([text, chosen.view(1, 1)], dim=1)
    engine.train()
    written = bytes(text[0].tolist()).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in written)


def few_losses(config: dict, text: bytes, options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Returns the mean losses of a new model's first steps, and prints its ledger."""
    torch.manual_seed(options.seed)
    heads = max(1, options.width // 64)
    with penstock.init():
        model = GPT(GPTConfig(options.layers, options.width, heads, context=options.seq))
    engine = penstock.initialize(model, config)
    windows = Windows(text, options, ranks, options.seed)
    losses = []
    for _ in range(DISK_STEPS):
        loss = engine(*windows.next())
        engine.backward(loss)
        engine.step()
        losses += ranks.mean(float(loss.detach()))
    ranks.say(penstock.format_ledger(engine.ledger()) + "\n")
    engine.close()
    return losses


def show_disk(config: dict, text: bytes, options: argparse.Namespace, ranks: Ranks) -> None:
    """Trains the same model in memory, and with its parameters and optimizer on disk."""
    config = config | {"monitor": {}}  # its files belong to the run above
    ranks.say(f"\nthe first {DISK_STEPS} steps again, in memory:")
    memory = few_losses(config, text, options, ranks)
    ranks.say("and with parameters and optimizer state on disk:")
    on_disk = {"optimizer": "disk", "params": "disk"}
    disk = few_losses(config | {"offload": on_disk}, text, options, ranks)
    for step, (a, b) in enumerate(zip(memory, disk, strict=True), 1):
        ranks.say(f"step {step}: loss {a:.6f} in memory, {b:.6f} on disk, equal: {a == b}")


def main() -> None:
    began = time.perf_counter()
    options, ranks = parse_options(), Ranks()
    config = make_config(options)
    options.batch = config["batch"].get("micro", options.batch)
    train_text, validation_text = read_text(options.data)
    torch.manual_seed(options.seed)
    heads = max(1, options.width // 64)
    model = GPT(GPTConfig(options.layers, options.width, heads, context=options.seq))
    num_params = sum(param.numel() for param in model.parameters())
    engine = penstock.initialize(model, config)
    ranks.say(
        f"{num_params / 1e6:.2f} M parameters, {config['strategy']}, {config['precision']}, "
        f"{ranks.size} ranks x {torch.get_num_threads()} threads; {len(train_text) / 1e6:.2f} MB "
        f"of text for training, {len(validation_text) / 1e6:.2f} MB for validation\n"
    )
    ranks.say(penstock.format_ledger(engine.ledger(), measured=False) + "\n")

    windows = Windows(train_text, options, ranks, options.seed)
    if options.checkpoint:
        engine.register_for_checkpointing(windows)
        engine.load("auto")
        if engine.steps:
            ranks.say(f"going on from step {engine.steps} of {options.checkpoint}\n")
    seconds = train(engine, windows, options, ranks)
    held_out = Windows(validation_text, options, ranks, options.seed)
    loss, num_bytes = validate(engine, held_out, options, ranks)
    ranks.say(f"\nvalidation loss {loss:.4f} nats/byte over {num_bytes} bytes")
    ranks.say(f"\nsample after 'def ':\n{sample(engine, b'def ', options)}\n")
    ranks.say(penstock.format_ledger(engine.ledger()))
    engine.close()
    if options.demo and config["strategy"] == "zero3":
        show_disk(config, train_text, options, ranks)
    if options.monitor and ranks.rank == 0:
        page = pathlib.Path(options.monitor, "report.html")
        report.write([options.monitor], page)
        ranks.say(f"\nreport: {page}    timeline, for ui.perfetto.dev: {page.parent}/trace.json")
    ranks.say(f"\ntraining took {seconds:.1f} s, all {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
