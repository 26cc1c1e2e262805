"""Generation as `penstock plan --generate` predicts it, beside what it takes: seconds, tokens per
second and bytes of the KV cache, for models and caches on the device, in host memory and on disk.

    python benchmarks/generation.py [--cases batch=8,prompt=128,new=8,params=disk ...]
        [--width 2048 --layers 22] [--precision fp32] [--limit-mib 0] [--machine machine.json]
        [--path FOLDER] [--json FILE]

A case has `batch` sequences, a `prompt` of so many tokens, `new` tokens that are generated after
it, `params` device, host, disk, and optionally `quantize` int8 or int4 (of the parameters), `cache`
host or disk, and `codes` int8 or int4 (of the cache). With `repeat=1`, one prompt is computed once
and then repeated for the batch; its seconds are left out on both sides.

The model is a Llama with random weights, 2048 wide with 4 of 32 heads for keys and values. Each
case is a fresh process; `--limit-mib` is its limit of memory with the page cache (a memory cgroup,
needs root). Without --machine, `penstock bench` runs before and after each case, with the width of
the model, and the predictions from both are averaged, because the speed of a shared machine
changes. A step is the median of the steps after the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from inference import CGROUP, config_of
from measure import machine, write_json

CASES = (
    "batch=1,prompt=64,new=8,params=device",
    "batch=16,prompt=64,new=8,params=device",
    "batch=16,prompt=64,new=8,params=host",
    "batch=16,prompt=64,new=8,params=disk",
    "batch=1,prompt=64,new=8,params=disk",
    "batch=16,prompt=64,new=8,params=disk,quantize=int8",
    "batch=32,prompt=8160,new=4,params=device,cache=disk,repeat=1",
    "batch=32,prompt=8160,new=4,params=device,cache=disk,codes=int8,repeat=1",
)
COMMAND = str(pathlib.Path(sys.executable).with_name("penstock"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def case_of(text: str) -> dict[str, Any]:
    given = dict(part.split("=") for part in text.split(","))
    numbers = ("batch", "prompt", "new", "repeat")
    return {key: int(value) if key in numbers else value for key, value in given.items()}


def config_for(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The engine's config."""
    offload: dict[str, Any] = {}
    if case["params"] != "device":
        offload["params"] = case["params"]
    if "cache" in case:
        offload["cache"] = case["cache"]
    if "disk" in offload.values():
        offload["path"] = options.path
    quantize = {"dtype": case.get("quantize", "none"), "cache": case.get("codes", "none")}
    return {
        "inference": True,
        "strategy": "ddp" if case["params"] == "device" else "zero3",
        "precision": options.precision,
        "prefetch_bytes": 256 << 20,
        "offload": offload,
        "quantize": quantize,
    }


# ---- in the tries


def generates(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, DynamicCache  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    config = config_of(options)
    config.max_position_embeddings = 1 << 16
    with penstock.init(path=options.path):
        torch.set_default_dtype(DTYPES[options.precision])
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    engine = penstock.initialize(model, config_for(case, options))
    before = engine.ledger()["measured"]["disk"]
    prompt = torch.randint(3, 32000, (1 if case.get("repeat") else case["batch"], case["prompt"]))
    cache, steps = DynamicCache(config=config), []
    with torch.no_grad():
        model(prompt[:, :2], past_key_values=DynamicCache())  # the first read of each unit
        begin = time.perf_counter()
        token = model(prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        prefill = time.perf_counter() - begin
        if case.get("repeat"):
            cache.batch_repeat_interleave(case["batch"])
            token = token.repeat_interleave(case["batch"], dim=0)
        for _ in range(case["new"] - 1):
            begin = time.perf_counter()
            token = model(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            steps.append(time.perf_counter() - begin)
    told = {"prefill_s": prefill, "steps_s": steps, "step_s": statistics.median(steps[1:])}
    measured = engine.ledger()["measured"]
    told["cache_memory"] = measured["cache"]
    told["cache_disk"] = measured["disk"] - before
    if case.get("cache") is None:
        tensors = [one for layer in cache.layers for one in (layer.keys, layer.values)]
        told["cache"] = sum(one.numel() * one.element_size() for one in tensors)
    else:
        told["cache"] = told[f"cache_{'disk' if case['cache'] == 'disk' else 'memory'}"]
    engine.close(gather=False)
    return told


def run_try(options: argparse.Namespace) -> None:
    if options.limit_mib:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    write_json(options.result, generates(case_of(options.run), options))


# ---- the parent


def predicted(
    case: dict[str, Any], options: argparse.Namespace, folder: str, machine_path: str
) -> dict[str, Any]:
    config = config_for(case, options)
    config["quantize"].pop("dtype")
    if config["offload"].pop("params", None) == "disk" and case.get("cache") != "disk":
        config["offload"].pop("path")
    if case.get("cache") is None:
        config.pop("quantize")
    command = [COMMAND, "plan", "--json"]
    command += ["--model", f"{folder}/config.json", "--machine", machine_path]
    command += ["--config", json.dumps(config), "--generate"]
    command += [f"batch={case['batch']},prompt={case['prompt']},new={case['new']},keep=0"]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr + done.stdout)
    report = json.loads(done.stdout)
    wanted = {"tier": case["params"], "dtype": case.get("quantize", options.precision)}
    [mode] = [one for one in report["modes"] if one["mode"] == wanted]
    return {**mode, "cache": report["cache_bytes_of_batch"], "share": report["cache_share"]}


def tried(text: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, __file__, "--run", text, "--result", str(result)]
        command += ["--path", folder, "--precision", options.precision]
        command += ["--width", str(options.width), "--layers", str(options.layers)]
        command += ["--limit-mib", str(options.limit_mib)]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode != 0:
            return {"failed": f"exit {done.returncode}: {done.stderr[-600:]}"}
        told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return told


def measured_machine(options: argparse.Namespace, folder: str, when: str) -> str:
    """Returns a file with the speeds of the machine at this time."""
    if options.machine:
        return str(options.machine)
    path = f"{folder}/{when}.json"
    earlier = pathlib.Path(f"{folder}/after.json")
    if when == "before" and earlier.exists():  # of the case before
        return str(earlier.replace(path))
    command = [COMMAND, "bench", "--disk", options.path, "-o", path]
    command += ["--precision", options.precision, "--width", str(options.width)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def compared(text: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    case = case_of(text)
    before = predicted(case, options, folder, measured_machine(options, folder, "before"))
    one: dict[str, Any] = {"case": text, "measured": tried(text, options)}
    after = predicted(case, options, folder, measured_machine(options, folder, "after"))
    means = {key: (before[key] + after[key]) / 2 for key in ("prefill_s", "step_s")}
    one["predicted"] = {**after, **means}
    if "failed" in one["measured"]:
        print(f"| {text} | {one['measured']['failed']} |", flush=True)
        return one
    plan, real = one["predicted"], one["measured"]
    steps = case["new"] - 1
    seconds = [one["prefill_s"] + steps * one["step_s"] for one in (plan, real)]
    if case.get("repeat"):
        seconds = [steps * one["step_s"] for one in (plan, real)]
    one["ratio"] = seconds[0] / seconds[1]  # tokens/s measured over predicted
    cache = plan["cache"] * (plan["share"] if "cache" in case else 1)
    one["cache_ratio"] = real["cache"] / cache
    print(
        f"| {text} | {plan['prefill_s']:.2f}, {real['prefill_s']:.2f} | {plan['step_s']:.3f}, "
        f"{real['step_s']:.3f} | {plan['longest']} | {one['ratio']:.2f} | {cache / 1e6:.1f} MB, "
        f"{one['cache_ratio']:.3f} |",
        flush=True,
    )
    return one


def parent(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        config_of(options).save_pretrained(folder)
        if options.limit_mib:
            CGROUP.mkdir(exist_ok=True)
            limit = CGROUP / "memory.limit_in_bytes"
            limit.write_text(str(options.limit_mib << 20), encoding="ascii")
        print("predicted, measured; the ratio is measured / predicted tokens per second")
        print("| case | prefill s | step s | longest | ratio | KV cache, measured / predicted |")
        print("|---|---|---|---|---|---|")
        try:
            rows = [compared(text, options, folder) for text in options.cases]
        finally:
            if options.limit_mib:
                CGROUP.rmdir()
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--limit-mib", type=int, default=0, help="0: no limit")
    parser.add_argument("--machine", default="", help="file of penstock bench")
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--json", default="")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_try(options)
    else:
        parent(options)


if __name__ == "__main__":
    main()
