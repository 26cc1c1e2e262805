"""The largest GPT that trains on one device with its state in host memory.

    python benchmarks/gpu_max_model.py [--device cuda] [--budget-s 400] [--json FILE]

`penstock plan` predicts the bytes of a model with parameters, gradients and optimizer on the host,
and with them how many blocks the memory that is free can hold. The sizes that are tried are parts
of that number, the smallest first, each in a process of its own, until one fails or the time is up.
The model is built on the device in bf16. With --moments bf16 the moments take half.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

import accelerator
import gpu_runs
import torch
import watched
from accelerator import Deadline
from measure import write_json

import penstock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

GIB = 2.0**30
STEPS = 3
PINNED_BYTES = 4.0  # per parameter: weights and gradients in bf16, in pinned memory
PARTS = (0.6, 0.8, 0.9, 1.0, 1.1)  # of the blocks that are predicted to fit
ENOUGH_S = 400.0  # a larger budget would not be spent on more
UNFINISHED = 3  # exit code: what is left would be done with more time
HOST_SHARE = 0.94  # of what is free, for the prediction


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help='"cuda", "sim", "cpu"')
    add("--budget-s", type=float, default=400.0)
    add("--host-gib", type=float, help="host memory to fill (default: what is free)")
    add("--width", type=int, help="of the model")
    add("--batch", type=int, default=4, help="sequences per step")
    add("--context", type=int, help="tokens of a sequence")
    add("--moments", default="fp32", choices=("fp32", "bf16"), help="dtype of Adam's moments")
    add("--json", help="file for all figures")
    add("--layers", type=int, help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    real = options.device not in ("cpu", "sim")
    options.width = options.width or (4608 if real else 128)
    options.context = options.context or (2048 if real else 64)
    return options


def config_of(options: argparse.Namespace, layers: int) -> GPTConfig:
    heads = max(1, options.width // 128)
    return GPTConfig(layers, options.width, heads, options.context, 32768)


def settings(moments: str) -> dict[str, Any]:
    return {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "host", "params": "host", "gradients": "host"},
        "optimizer": {"type": "AdamW", "lr": 1e-4, "moments_dtype": moments},
    }


# ---- one size


def worker(options: argparse.Namespace) -> None:
    """Builds and trains; the result file is written as soon as there is more to say."""
    device = accelerator.open_device(options.device)
    config = config_of(options, options.layers)
    result: dict[str, Any] = {"step_s": [], "losses": []}
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = GPT(config)
    torch.set_default_dtype(torch.float32)
    rest = {"units": {"modules": [Block.__name__]}, "activations": {"checkpoint": "unit"}}
    engine = penstock.initialize(model, settings(options.moments) | rest, clip=1.0)
    accelerator.synchronize(device)
    result["setup_s"] = time.perf_counter() - begin
    accelerator.reset_peak(device)
    tokens = torch.randint(config.vocab, (options.batch, config.context + 1), device=device)
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        accelerator.synchronize(device)
        result["step_s"].append(time.perf_counter() - begin)
        result["losses"].append(float(loss))
        result["device_bytes"] = accelerator.peak_bytes(device)
        result["ledger"] = engine.ledger()["measured"]
        write_json(options.result, result)
    os._exit(0)  # no closing: it would gather what rests on the host


# ---- in the one that starts them


def predicted_bytes(options: argparse.Namespace, layers: int) -> tuple[int, int]:
    """Returns the bytes of device and host that `penstock plan` predicts; on the host, with what
    torch adds when it rounds pinned blocks up to powers of two, which the plan does not count."""
    config = config_of(options, layers)
    rounded = (gpu_runs.pinned_rounding(config) - 1.0) * PINNED_BYTES * gpu_runs.count(config)[0]
    model = f"gpt:layers={layers},hidden={config.width},vocab={config.vocab},seq={config.context}"
    command = [sys.executable, "-m", "penstock", "plan", "--model", model, "--world", "1"]
    command += ["--config", json.dumps(settings(options.moments)), "--json"]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    for one in json.loads(done.stdout)["alternatives"]:
        if (one["strategy"], one["optimizer"], one["params"]) == ("zero3", "host", "host"):
            return one["device"], int(one["host"] + rounded)
    raise SystemExit(f"penstock plan knows no zero3 with all on the host: {done.stdout[:500]}")


def predicted_layers(options: argparse.Namespace, host_bytes: float) -> int:
    """Blocks that fit: bytes are a constant and so many for each block."""
    few, many = 4, 12
    (_, a), (_, b) = predicted_bytes(options, few), predicted_bytes(options, many)
    of_block = (b - a) / (many - few)
    return max(1, int((HOST_SHARE * host_bytes - a) / of_block) + few)


def attempt(options: argparse.Namespace, layers: int, limit_s: float) -> dict[str, Any]:
    command = [__file__, "--layers", str(layers)]
    for name in ("device", "width", "batch", "context", "moments"):
        command += [f"--{name}", str(getattr(options, name))]
    return {"error": "", "step_s": []} | watched.run(command, limit_s)


def try_sizes(options: argparse.Namespace, whole: dict[str, Any], deadline: Deadline) -> None:
    tries = whole["tries"] = []
    last_s = 0.0
    for part in PARTS:
        layers = max(1, int(part * whole["predicted_layers"]))
        if deadline.left_s() < 20.0 + 1.4 * last_s:
            whole["ended"] = f"no time for {layers} blocks"
            whole["unfinished"] = options.budget_s < ENOUGH_S
            return
        begin = time.monotonic()
        config = config_of(options, layers)
        params = gpu_runs.count(config)[0]
        one = attempt(options, layers, deadline.left_s() - 5.0)
        last_s = time.monotonic() - begin
        device_bytes, host_bytes = predicted_bytes(options, layers)
        one |= {"layers": layers, "params": params, "seconds": last_s}
        one |= {"predicted_device": device_bytes, "predicted_host": host_bytes}
        if one["step_s"]:
            one["tokens_per_s"] = options.batch * options.context / min(one["step_s"])
        tries.append(one)
        show(one)
        write_json(options.json, whole)
        if one["error"]:
            whole["ended"] = f"{layers} blocks: {one['error'].strip().splitlines()[-1]}"
            return
    whole["ended"] = "all sizes passed"


def show(one: dict[str, Any]) -> None:
    counted = one.get("ledger", {}).get("host", 0)
    host = f"host {counted / GIB:.1f} GiB (predicted {one['predicted_host'] / GIB:.1f}"
    left = f"{one['least_available_bytes'] / GIB:.1f} left free)"
    step_s = min(one["step_s"], default=0.0)
    speed = f"step {step_s:.2f} s, {one.get('tokens_per_s', 0.0):.0f} tokens/s"
    device = f"device {one.get('device_bytes', 0) / GIB:.1f} GiB"
    outcome = "FAILED" if one["error"] else "passed"
    size = f"{one['layers']:>4} blocks {one['params'] / 1e9:8.3f}e9"
    print(f"{size}  {outcome}  {speed}  {host}, {left}  {device}  {one['seconds']:.0f} s in all")
    if one["error"]:
        print(one["error"][-600:])


def main() -> None:
    options = parse_options()
    if options.result:
        worker(options)
        return
    deadline = Deadline(options.budget_s)
    real = options.device not in ("cpu", "sim")
    free = accelerator.available_bytes() if real else 0.25 * GIB
    host_bytes = options.host_gib * GIB if options.host_gib else free
    device = accelerator.open_device(options.device)
    whole: dict[str, Any] = {"machine": accelerator.described(device), "host_bytes": host_bytes}
    try:
        whole["predicted_layers"] = predicted_layers(options, host_bytes)
        print(f"predicted: {whole['predicted_layers']} blocks in {host_bytes / GIB:.1f} GiB")
        try_sizes(options, whole, deadline)
    except (OSError, ValueError):
        whole["ended"] = traceback.format_exc()[-2000:]
    passed = [one for one in whole.get("tries", []) if not one["error"]]
    whole["largest"] = max((one["params"] for one in passed), default=0)
    print(f"largest: {whole['largest'] / 1e9:.3f}e9 parameters; {whole['ended']}")
    write_json(options.json, whole)
    if whole.get("unfinished"):
        raise SystemExit(UNFINISHED)
    if not passed:
        raise SystemExit("no size passed")


if __name__ == "__main__":
    main()
