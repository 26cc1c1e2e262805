"""Checks an installed wheel, without the tree and without a compiler.

    python -I check.py SECONDS     # the most that `import penstock` may take after torch's

Two ranks train a small model under `zero3` with an optimizer on disk, and one process does the
same with plain torch. The program prints both results, and ends with an error if they differ.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

STEPS, RANKS = 5, 2
TRAINS = """
import os, torch, penstock
from torch import nn
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
batches = [torch.randn(8, 16) for _ in range(STEPS)]
if RANKS > 1:
    engine = penstock.initialize(model, {
        "strategy": "zero3", "offload": {"optimizer": "disk", "path": SWAP},
        "optimizer": {"type": "AdamW", "lr": 0.01}})
    for whole in batches:
        batch = whole.chunk(RANKS)[rank]
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()
    weights = engine.state_dict(rank0_only=False)
    engine.close()
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches:
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
if rank == 0:
    print("weights", float(sum(one.double().abs().sum() for one in weights.values())))
"""


def script(folder: pathlib.Path, ranks: int) -> pathlib.Path:
    """Writes the script above, for this many ranks."""
    head = f"STEPS, SWAP, RANKS = {STEPS}, {str(folder)!r}, {ranks}\n"
    path = folder / f"train{ranks}.py"
    path.write_text(head + TRAINS)
    return path


def weights(command: list[str]) -> float:
    """Runs the training and returns the number that it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return float(re.search(r"weights ([\d.e+-]+)", done.stdout).group(1))


def main(limit_s: float) -> None:
    """Raises SystemExit for the first check that fails."""
    for tool in ("cc", "c++", "g++", "gcc", "cmake", "ninja"):
        if shutil.which(tool):
            raise SystemExit(f"{tool} is installed, so this check proves nothing")
    import torch  # noqa: PLC0415

    began = time.perf_counter()
    import penstock  # noqa: PLC0415

    assert issubclass(penstock.ConfigError, Exception)  # the first use loads the library
    took = time.perf_counter() - began
    folder = pathlib.Path(penstock.__file__).parent
    if folder.parent != pathlib.Path(torch.__file__).parent.parent:
        raise SystemExit(f"{folder}: not beside torch")
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in lines if "libhwy" in line or "penstock" in line}
    if not loaded or any(not path.startswith(str(folder)) for path in loaded):
        raise SystemExit(f"loaded from elsewhere: {sorted(loaded)}")
    if took > limit_s:
        raise SystemExit(f"import penstock took {took:.2f} s after torch's, the limit is {limit_s}")
    print(f"import penstock: {took:.2f} s after torch's; {len(loaded)} libraries, all the wheel's")

    asks = "import importlib.metadata as m, deepspeed; print(m.version('deepspeed'))"
    drop_in = subprocess.run(
        [sys.executable, "-c", asks],
        env={**os.environ, "PENSTOCK_AS_DEEPSPEED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if drop_in.returncode != 0 or "penstock" not in drop_in.stdout:
        raise SystemExit(f"the drop-in is not found as deepspeed:\n{drop_in.stderr}")
    print(f"deepspeed, as penstock: {drop_in.stdout.strip()}")

    command = os.path.join(os.path.dirname(sys.executable), "penstock")
    with tempfile.TemporaryDirectory() as name:
        here = pathlib.Path(name)
        plain = weights([sys.executable, str(script(here, 1))])
        run = [command, "run", "--nproc", str(RANKS), str(script(here, RANKS))]
        ours = weights(run)
    if abs(plain - ours) > 1e-5 * abs(plain):
        raise SystemExit(f"trained to {ours}, and plain torch to {plain}")
    print(f"penstock run --nproc {RANKS}: trained to {ours:.6f}, plain torch to {plain:.6f}")


if __name__ == "__main__":
    main(float(sys.argv[1]))
