"""Trains a small GPT and hands its weights to another process after some steps, as for a server
that generates while training goes on.

    python -m penstock run --nproc 2 examples/serve_weights.py
    torchrun --nproc-per-node 2 examples/serve_weights.py --steps 12 --every 4

The reader has the same model and takes weights while it is open. It puts a version into its model
only when the version is complete, and then compares a checksum and the loss of one batch with the
trainer's. Replace Reader by your server: vLLM's `load_weights()` and SGLang's
`update_weights_from_tensor()` take the same pairs of names and tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig

import penstock

CONFIG = GPTConfig(vocab=256, width=64, layers=3, heads=4, context=64)
KEY = b"serve_weights"
END = "end"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--every", type=int, default=3, help="steps between two versions")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    parser.add_argument("--reader", metavar="ADDRESS", help=argparse.SUPPRESS)
    return parser.parse_args()


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, CONFIG.vocab, (4, CONFIG.context + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def checksum(weights: dict[str, torch.Tensor]) -> str:
    made = hashlib.sha256()
    for name in sorted(weights):
        made.update(name.encode())
        made.update(weights[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


# ---- the reader


class Reader:
    """A model that takes weights from a trainer."""

    def __init__(self, trainer: Connection) -> None:
        self._trainer = trainer
        self._model = GPT(CONFIG).eval()

    def run(self) -> int:
        """Takes versions until the trainer ends. Returns the process's exit status."""
        version = 0
        print(f"reader: process {os.getpid()}", flush=True)
        try:
            while True:
                message, version_given = self._trainer.recv()
                if message == END:
                    print(f"reader: the trainer is done; the last version is {version}", flush=True)
                    return 0
                version = self._take(version_given)
        except (EOFError, ConnectionError):
            print(
                f"reader: the trainer ended too early; the model keeps version {version}",
                flush=True,
            )
            return 1

    def _take(self, version: int) -> int:
        """Puts a version into the model once it is complete."""
        arrived: dict[str, torch.Tensor] = {}
        while True:
            name, value = self._trainer.recv()
            if name == END:
                break
            arrived[name] = torch.frombuffer(bytearray(value[2]), dtype=value[0]).view(value[1])
        expected, loss = value
        if checksum(arrived) != expected:
            raise RuntimeError(f"reader: version {version} differs from the trainer's weights")
        self._model.load_state_dict(arrived)
        with torch.no_grad():
            own = float(self._model(*batch(0)))
        if abs(own - loss) > 1e-5:
            raise RuntimeError(f"reader: version {version} has the loss {own}, not {loss}")
        print(f"reader: version {version} has {len(arrived)} tensors, loss {own:.4f}", flush=True)
        self._trainer.send(version)
        return version


# ---- the trainer


class Server:
    """The connection to a reader, on rank 0. All ranks call the same methods."""

    def __init__(self) -> None:
        self._reader: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if rank() > 0:
            return
        with Listener(authkey=KEY) as listener:
            command = [sys.executable, __file__, "--reader", str(listener.address)]
            self._process = subprocess.Popen(command)
            self._reader = listener.accept()
        print(f"trainer: process {os.getpid()}", flush=True)

    def give(self, engine: penstock.Engine, bucket_bytes: int) -> None:
        """Sends the weights of this step. Without a reader, rank 0 only takes part."""
        with engine.inference("stream"):
            loss = float(engine(*batch(0)))
        whole: dict[str, torch.Tensor] = {}
        self._send(("version", engine.steps))
        for name, value in engine.weights(bucket_bytes=bucket_bytes):
            if rank() == 0:
                whole[name] = value.detach().clone()  # for the checksum of this example
                self._send((name, pack(value)))
        self._send((END, (checksum(whole), loss)))
        if self._reader is not None:
            try:
                assert self._reader.recv() == engine.steps, "the reader has a stale version"
            except (EOFError, ConnectionError):
                self._lose()

    def close(self) -> None:
        self._send((END, 0))
        if self._process is not None and self._process.wait(timeout=60) != 0:
            print("trainer: the reader failed", flush=True)

    def _send(self, message: Any) -> None:
        if self._reader is None:
            return
        try:
            self._reader.send(message)
        except ConnectionError:
            self._lose()

    def _lose(self) -> None:
        print("trainer: the reader ended; training goes on without it", flush=True)
        self._reader = None


def pack(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = value.detach().cpu().contiguous()
    return plain.dtype, tuple(plain.shape), plain.view(torch.uint8).numpy().tobytes()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def steps_of(engine: penstock.Engine, options: argparse.Namespace) -> Iterator[int]:
    for step in range(options.steps):
        loss = engine(*batch(engine.data_rank))
        engine.backward(loss)
        engine.step()
        yield step + 1


def main() -> int:
    options = parse_options()
    if options.reader:
        with Client(options.reader, authkey=KEY) as trainer:
            return Reader(trainer).run()
    torch.manual_seed(0)
    config = {"strategy": options.strategy, "optimizer": {"type": "AdamW", "lr": 1e-3}}
    engine = penstock.initialize(GPT(CONFIG), config)
    server = Server()
    for step in steps_of(engine, options):
        if step % options.every == 0:
            server.give(engine, options.bucket_bytes)
    server.close()
    engine.close()
    if rank() == 0:
        print(f"trainer: {options.steps} steps", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
