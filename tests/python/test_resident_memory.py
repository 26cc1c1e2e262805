"""A rank has little memory besides interpreter, torch, ledger and activations, and all is named."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch

from penstock.monitor import flops

MIB = 2**20
# 15 to 36 MiB were measured: 20 of code (12 of torch's operators, 8 of the engine), up to 16 of
# scratch memory of torch's matrix products, and a few of objects.
LARGEST_MIB = 48
# torch's scratch memory counts as in use in the heap, but is not all touched.
SCRATCH_MIB = 17

# Trains in new processes, because torch imports its compiler once and keeps it.
RANK = """
import ctypes, json, pathlib, re, sys
import torch
import torch.distributed as dist
from torch import nn
import penstock

def resident():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) * 1024

def trim():
    ctypes.CDLL(None).malloc_trim(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
trim()
before = resident()
model = nn.Sequential(*(Block() for _ in range(4)))
engine = penstock.initialize(model, json.loads(sys.argv[1]))
for _ in range(3):
    engine.backward(engine(torch.ones(256, 512)).pow(2).mean())
    engine.step()
ledger = engine.ledger()
used = resident()
trim()
figures = {
    "beside": resident() - before - ledger["resident"]["engine"],
    "kept": ledger["resident"]["heap_free"],
    "returned": used - resident(),
    "compiler": "torch._dynamo" in sys.modules,
    "text": penstock.format_ledger(ledger),
}
engine.close()
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[2]).write_text(json.dumps(figures))
dist.barrier()
dist.destroy_process_group()
"""

CASES = {
    "ddp": {"strategy": "ddp"},
    "zero3 with metrics": {"strategy": "zero3", "monitor": {"path": "metrics"}},
    "disk": {
        "strategy": "zero3",
        "offload": {"optimizer": "disk", "params": "disk", "gradients": "disk", "path": "."},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_memory_beside_the_ledger_is_small_and_named(name, tmp_path):
    config = {"optimizer": {"type": "AdamW", "lr": 1e-3}, **CASES[name]}
    script, result = tmp_path / "rank.py", tmp_path / "result.json"
    script.write_text(RANK)
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(script)]
    done = subprocess.run(
        [*command, json.dumps(config), str(result)],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(result.read_text())
    beside, kept, returned = (found[key] / MIB for key in ("beside", "kept", "returned"))
    assert not found["compiler"], "something imports torch's compiler"
    assert beside < LARGEST_MIB, found
    assert abs(returned - kept) < SCRATCH_MIB, found
    *parts, rest = (float(one) for one in re.findall(r"[ a-z,()]+(\d+\.\d\d)", process(found)))
    whole, *parts = parts
    assert sum(parts) + rest == pytest.approx(whole, abs=SCRATCH_MIB), found["text"]


def process(found):
    """Returns the ledger's line on the process: all of it, and its parts."""
    (line,) = (line for line in found["text"].splitlines() if line.startswith("the process now"))
    return line


@pytest.mark.parametrize("compiler", [False, True], ids=["not imported", "imported"])
def test_flops_are_counted_with_and_without_torchs_compiler(compiler, monkeypatch):
    if compiler:
        importlib.import_module("torch._dynamo")
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with flops.counter(lambda: 7) as counter:
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert counter.by_unit == {7: 2 * 3 * 4 * 5}
    assert counter._should_skip_dynamo() == compiler
