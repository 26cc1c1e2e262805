"""Text from a model that memory does not hold: Penstock with parameters on disk beside accelerate's
disk map and llama.cpp's mmap, under one limit of memory.

    python benchmarks/inference.py [--width 2048 --layers 22] [--limit-mib 1500]
        [--batches 1 16 64] [--new 8] [--rounds 3] [--path FOLDER] [--json FILE]
        [--keep-mib 0] [--prefetch-mib 256] [--llama-python PYTHON] [--runs NAME ...]
        [--disk-mb-per-s 0]

The model is a Llama with random bf16 weights, in safetensors files that are written first. Each try
is a fresh process that loads the files and generates `--new` tokens greedily after a prompt of 16,
for every batch size: once untimed, then timed. One forward runs per new token, so without a limit
of compute a token of the whole batch takes as long as reading the model once. The tries of a round
take turns. `fio` reads as many bytes in the same round, with O_DIRECT: the limit.

Penstock runs in five ways: "penstock" loads with from_pretrained() and copies the weights to its
swap file, "penstock files" leaves them in the safetensors files (`penstock.init(weights=...)`), and
"penstock int8", "penstock int4" and "penstock int4 head" (which also rounds the head) read these
files once and keep rounded weights in the swap file.
`--keep-mib` of the weights stay in memory (`offload.keep_bytes`).
"deepspeed" is its ZeRO-Inference, if it is installed (start it once by itself first, since it
compiles an operator). llama.cpp runs if `--llama-python` is a Python that has llama-cpp-python and
gguf; it gets the same weights, in a GGUF file.

The limit of memory is a memory cgroup (version 1, needs root) that also counts the page cache, so
no contestant keeps the files in memory. Without it, the benchmark refuses to run.
`--disk-mb-per-s` limits reads from the disk by another cgroup, for all contestants. Then reading
takes longer than computing on slow CPUs, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from measure import DEEPSPEED_AIO, machine, write_json

CGROUP = pathlib.Path("/sys/fs/cgroup/memory/penstock-inference")
DISK_CGROUP = pathlib.Path("/sys/fs/cgroup/blkio/penstock-inference")
PROMPT = 16
RUNS = (
    "penstock files",
    "accelerate",
    "llama.cpp",
    "deepspeed",
    "penstock",
    "penstock int8",
    "penstock int4",
    "penstock int4 head",
)
PROMPTS = "prompts.json"
LLAMA = pathlib.Path(__file__).with_name("llama_cpp_run.py")


def config_of(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig  # noqa: PLC0415

    heads = options.width // 64
    return LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        vocab_size=32000,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


# ---- in the tries


def write_model(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config_of(options))
    model.save_pretrained(options.model, max_shard_size="200MB")


def penstock_model(options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    with penstock.init(path=options.path):
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    return started(model, options)


def started(
    model: Any, options: argparse.Namespace, dtype: str = "none", head: bool = False
) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(
        model,
        inference=True,
        strategy="zero3",
        precision="bf16",
        offload={"params": "disk", "path": options.path, "keep_bytes": options.keep_mib << 20},
        prefetch_bytes=options.prefetch_mib << 20,
        quantize={"dtype": dtype}
        | ({"params": ["*proj.weight", "lm_head.weight"]} if head else {}),
    )


def penstock_files_model(
    options: argparse.Namespace, dtype: str = "none", head: bool = False
) -> Any:
    from accelerate import init_empty_weights  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    config = AutoConfig.from_pretrained(options.model)
    with penstock.init(weights=options.model), init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return started(model, options, dtype, head)


def accelerate_model(options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        return AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=torch.bfloat16,
            device_map={"": "disk"},
            offload_folder=folder,
        )


def deepspeed_model(options: argparse.Namespace) -> Any:
    """ZeRO-Inference: stage 3 with the parameters on NVMe; buffers of the largest parameter."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed  # noqa: PLC0415 - optional
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.integrations import HfDeepSpeedConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(options.model)
    largest = config.vocab_size * config.hidden_size
    block = (config.intermediate_size * 3 + config.hidden_size * 3) * config.hidden_size
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": options.path,
                "pin_memory": False,
                "buffer_count": 5,
                "buffer_size": largest + 4096,
                "max_in_cpu": 0,
            },
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": config.hidden_size,
        },
        "aio": DEEPSPEED_AIO,
    }
    asks_for_stage_3 = HfDeepSpeedConfig(settings)  # from_pretrained() looks for it
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    assert asks_for_stage_3 is not None
    return engine.module


def bytes_read() -> int:
    lines = pathlib.Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def prompts(batch: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 32000, (batch, PROMPT))


def generate(model: Any, batch: int, new: int) -> torch.Tensor:
    made: torch.Tensor = model.generate(
        prompts(batch), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return made[:, PROMPT:]


def run_try(options: argparse.Namespace) -> None:
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    begin = time.perf_counter()
    model = MODELS[options.run](options)
    told: dict[str, Any] = {"load_s": time.perf_counter() - begin, "batches": {}}
    for batch in options.batches:
        generate(model, batch, 1)
        begin, before = time.perf_counter(), bytes_read()
        made = generate(model, batch, options.new)
        seconds = time.perf_counter() - begin
        told["batches"][str(batch)] = {
            "pass_s": seconds / options.new,
            "tokens_per_s": batch * options.new / seconds,
            "read_gb_per_pass": (bytes_read() - before) / options.new / 1e9,
            "first": made[0].tolist(),
        }
    write_json(options.result, told)


MODELS = {
    "penstock": penstock_model,
    "penstock files": penstock_files_model,
    "penstock int8": functools.partial(penstock_files_model, dtype="int8"),
    "penstock int4": functools.partial(penstock_files_model, dtype="int4"),
    "penstock int4 head": functools.partial(penstock_files_model, dtype="int4", head=True),
    "accelerate": accelerate_model,
    "deepspeed": deepspeed_model,
}

# ---- the parent


def limited(options: argparse.Namespace, run: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, __file__]
        if run == "llama.cpp":
            command = [options.llama_python, str(LLAMA)]
            command += ["--prompts", str(pathlib.Path(options.model) / PROMPTS)]
            command += ["--cgroup", str(CGROUP)]
        command += ["--run", run, "--result", str(result)]
        command += ["--path", folder, "--model", str(options.model), "--new", str(options.new)]
        command += ["--prefetch-mib", str(options.prefetch_mib)]
        command += ["--keep-mib", str(options.keep_mib), "--batches"]
        command += [str(one) for one in options.batches]
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        done = subprocess.run(command, text=True, capture_output=True, preexec_fn=slow_down)
        if done.returncode != 0:
            return {"failed": f"exit {done.returncode}: {done.stderr[-600:]}"}
        told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return told


def fio_gb_per_s(options: argparse.Namespace, size: int) -> float:
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        command = ["fio", "--name=read", f"--filename={folder}/file", "--rw=read", "--bs=4m"]
        command += ["--iodepth=8", "--ioengine=libaio", "--direct=1", f"--size={size}"]
        done = subprocess.run(
            command, text=True, capture_output=True, check=True, preexec_fn=slow_down
        )
    found = re.search(r"READ: bw=[^(]*\(([0-9.]+)([MG])B/s\)", done.stdout)
    assert found, done.stdout
    return float(found[1]) * (1.0 if found[2] == "G" else 1e-3)


def slow_down() -> None:
    """Makes this process read as slowly as `--disk-mb-per-s` says."""
    if DISK_CGROUP.exists():
        (DISK_CGROUP / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def limit_disk(options: argparse.Namespace) -> None:
    if options.disk_mb_per_s == 0:
        return
    DISK_CGROUP.mkdir(exist_ok=True)
    device = os.stat(options.path).st_dev
    rate = f"{os.major(device)}:{os.minor(device)} {options.disk_mb_per_s * 1_000_000}"
    (DISK_CGROUP / "blkio.throttle.read_bps_device").write_text(rate, encoding="ascii")


def parent(options: argparse.Namespace) -> None:
    CGROUP.mkdir(exist_ok=True)
    limit_disk(options)
    try:
        limit = CGROUP / "memory.limit_in_bytes"
        limit.write_text(str(options.limit_mib << 20), encoding="ascii")
        with tempfile.TemporaryDirectory(dir=options.path) as folder:
            options.model = folder
            command = [sys.executable, __file__, "--run", "write", "--model", folder]
            command += ["--width", str(options.width), "--layers", str(options.layers)]
            subprocess.run(command, check=True)
            if options.llama_python:
                command = [options.llama_python, str(LLAMA), "--run", "write", "--model", folder]
                subprocess.run(command, check=True)
                given = {str(batch): prompts(batch).tolist() for batch in options.batches}
                write_json(str(pathlib.Path(folder) / PROMPTS), given)
            size = sum(one.stat().st_size for one in pathlib.Path(folder).glob("*.safetensors"))
            rounds = []
            for number in range(options.rounds):
                names = contestants(options)
                names = names[number % len(names) :] + names[: number % len(names)]
                one: dict[str, Any] = {"fio_gb_per_s": fio_gb_per_s(options, size)}
                one |= {name: limited(options, name) for name in names}
                rounds.append(one)
                print(json.dumps(one), flush=True)
        tell(options, size, rounds)
    finally:
        CGROUP.rmdir()
        if DISK_CGROUP.exists():
            DISK_CGROUP.rmdir()
    if options.json:
        write_json(options.json, {"machine": machine(), "model_bytes": size, "rounds": rounds})


def contestants(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in options.runs if name != "llama.cpp" or options.llama_python)


def tell(options: argparse.Namespace, size: int, rounds: list[dict[str, Any]]) -> None:
    fio = statistics.median(one["fio_gb_per_s"] for one in rounds)
    print(f"\nmodel {size / 1e9:.2f} GB, limit {options.limit_mib} MiB, fio {fio:.2f} GB/s")
    print("| contestant | batch | s per forward | tokens/s | GB read per forward | of fio |")
    print("|---|---|---|---|---|---|")
    for name in contestants(options):
        good = [one for one in rounds if "batches" in one[name]]
        if not good:
            print(f"| {name} | | failed: {rounds[0][name]['failed']} |")
            continue
        for batch in map(str, options.batches):
            each = [one[name]["batches"][batch] for one in good]
            seconds, tokens, read = (
                statistics.median(one[key] for one in each)
                for key in ("pass_s", "tokens_per_s", "read_gb_per_pass")
            )
            share = statistics.median(
                size / 1e9 / one[name]["batches"][batch]["pass_s"] / one["fio_gb_per_s"]
                for one in good
            )
            print(f"| {name} | {batch} | {seconds:.3f} | {tokens:.2f} | {read:.2f} | {share:.2f} |")
    first = contestants(options)[0]
    for name in contestants(options)[1:]:
        both = [one for one in rounds if "batches" in one[first] and "batches" in one[name]]
        for batch in map(str, options.batches) if both else ():
            ours, theirs = ([one[run]["batches"][batch] for one in both] for run in (first, name))
            ratios = [b["pass_s"] / a["pass_s"] for a, b in zip(ours, theirs, strict=True)]
            same = all(a["first"] == b["first"] for a, b in zip(ours, theirs, strict=True))
            print(f"batch {batch}: {first} is {statistics.median(ratios):.2f} times {name} "
                  f"({min(ratios):.2f}-{max(ratios):.2f}), same tokens: {same}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--limit-mib", type=int, default=1500)
    parser.add_argument("--prefetch-mib", type=int, default=256)
    parser.add_argument("--disk-mb-per-s", type=int, default=0, help="0: no limit")
    parser.add_argument("--keep-mib", type=int, default=0, help="weights that stay in memory")
    parser.add_argument("--llama-python", default="")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=RUNS, help="the first is compared"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--json", default="")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run == "write":
        write_model(options)
    elif options.run:
        run_try(options)
    else:
        parent(options)


if __name__ == "__main__":
    main()
