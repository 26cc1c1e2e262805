"""Compares how the drop-in and DeepSpeed read configs.

    pip install --target FOLDER deepspeed==0.19.8   (with DS_BUILD_OPS=0)
    .venv/bin/python tests/weekly/deepspeed_configs.py FOLDER [--seeds 0-1000] [--record]

Each seed mutates a config of tests/configs: other types, floats, numbers as text, nulls, "auto",
missing keys, unknown keys, sections that are not objects. Both sides must accept it with the same
settings, or both refuse it, or the difference is in the table of tests/drop_in/config_outcomes.py.
The command exits with 1 if a difference is not in the table, or if the example of one in the table
does not show it, and with 0 if FOLDER has no DeepSpeed. --record writes 100 of the results for the
daily test, tests/drop_in/config_outcomes.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import random
import subprocess
import sys
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "drop_in"))

from config_outcomes import (
    BATCH,
    DIFFERENCES,
    WORLD,
    ZERO,
    Difference,
    Outcome,
    difference,
    filled,
    ours,
)

from penstock._native import _penstock
from penstock.front import config_file

TESTS = pathlib.Path(__file__).resolve().parents[1]
RECORDED = TESTS / "drop_in" / "config_outcomes.json"
RECORDS = 100
# Runs with DeepSpeed: reads configs from stdin, one per line, and prints their outcomes.
READER = """
import json, logging, sys
import deepspeed.runtime.config as module
from deepspeed.utils import logger
logger.setLevel(logging.CRITICAL)

class Ranks:
    get_rank = staticmethod(lambda: 0)
    get_world_size = staticmethod(lambda *_: WORLD)

module.dist = Ranks

def scale_of(fp16):
    if not fp16.enabled:
        return None
    if fp16.loss_scale > 0:
        return [fp16.loss_scale, 0]
    return [2.0 ** fp16.initial_scale_power, fp16.loss_scale_window]

def values(config):
    zero, monitors = config.zero_config, config.monitor_config
    devices = [one and str(getattr(one.device, "value", one.device))
               for one in (zero.offload_optimizer, zero.offload_param)]
    clip = config.gradient_clipping
    return {
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu,
                  config.gradient_accumulation_steps],
        "stage": int(config.zero_optimization_stage),
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "clip": max(0, clip) if isinstance(clip, (int, float)) else clip,
        "scale": scale_of(config.float16_config),
        "offload": [None if one == "none" else one for one in devices],
        "optimizer": config.optimizer_name and config.optimizer_name.lower(),
        "scheduler": config.scheduler_name,
        "monitors": [monitors.csv_monitor.enabled, monitors.comet.enabled,
                     monitors.comet.samples_log_interval],
        **{field: getattr(zero, field) for field in FIELDS},
    }

for line in sys.stdin:
    given = json.loads(line)
    try:
        outcome = {"values": values(module.DeepSpeedConfig(given))}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    print("OUTCOME " + json.dumps(outcome), flush=True)
"""
NUMBERS = (0, 1, 2, 3, -1, 4, 8, 16, 100, 2.0, 2.5, 0.5, 1e8, 3686.4, 5e8, 1e-3, 2**40)
TEXTS = ("", "1", "2", " 3 ", "1e8", "100.0", "1_000", "0.5", "x", "true", "False", "on", "no")
WORDS = ("cpu", "nvme", "none", "CPU", "fp16", "bf16", "FP32", "mean", "sum", "Warn", "Adam", "inf")
ODD: tuple[Any, ...] = (None, "auto", True, False, [], {}, [1], ["a"], {"enabled": True}, {"a": 1})
OTHER_NAMES = (
    "zero_optimization.prefetch_bucket_size",
    "zero_optimization.max_live_parameters",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "data_types.keep_in_fp32_modules",
    "checkpoint.tag_validation",
    "aio.use_gds",
    "comms_logger.prof_ops",
)


def drawn(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS, WORDS, ODD, ODD))))


def retyped(rng: random.Random, value: Any) -> Any:
    """Another spelling of the value, or a value near it."""
    if isinstance(value, bool):
        return rng.choice((int(value), float(value), str(value), str(value).lower(), not value, 2))
    if isinstance(value, int | float):
        spelled = (str(value), float(value), f" {value} ", f"{value:e}", value + 0.5, -value, 0)
        return rng.choice((*spelled, value * 4, [value]))
    if isinstance(value, str):
        return rng.choice((value.upper(), value.lower(), value + "x", [value], 1))
    return drawn(rng)


def paths_in(section: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in section.items():
        paths.append((*before, key))
        if isinstance(value, dict):
            paths += paths_in(value, (*before, key))
    return paths


def put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = config.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        config = inner
    config[path[-1]] = value


def value_at(config: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def mutated(seed: int, bases: list[dict[str, Any]], keys: list[str]) -> dict[str, Any]:
    """The config of one seed: one of the bases with up to three changes."""
    rng = random.Random(seed)
    config = copy.deepcopy(rng.choice(bases))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(paths_in(config) or [("train_batch_size",)])
        change = rng.randrange(8)
        if change == 0:  # missing
            inner = value_at(config, path[:-1])
            inner.pop(path[-1], None)
        elif change == 1:  # unknown
            put(config, (*path[:-1], path[-1] + rng.choice(("x", ".y", "_size"))), drawn(rng))
        elif change <= 3:  # another known key
            put(config, tuple(rng.choice(keys).split(".")), drawn(rng))
        elif change <= 5:
            put(config, path, retyped(rng, value_at(config, path)))
        else:
            put(config, path, drawn(rng))
    return config


def configs(seeds: range) -> list[dict[str, Any]]:
    paths = sorted((TESTS / "configs").glob("*.json"))
    bases = [json.loads(_penstock.plain_json(config_file.text_of(path))) for path in paths]
    bases = [filled(one) for one in bases] + [one for one in bases if "auto" in str(one)][:2]
    keys = [key.replace(".*", ".enabled") for key, _, _ in _penstock.deepspeed_keys()]
    keys += OTHER_NAMES
    return [mutated(seed, bases, keys) for seed in seeds]


def theirs(folder: str, given: list[dict[str, Any]]) -> list[Outcome]:
    head = f"WORLD, FIELDS = {WORLD}, {tuple(ZERO.values())}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + READER],
        env={**os.environ, "PYTHONPATH": folder, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
        input="".join(json.dumps(one) + "\n" for one in given),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    return [json.loads(line.removeprefix("OUTCOME ")) for line in lines]


def record(results: list[tuple[dict[str, Any], Outcome]]) -> None:
    """Writes a sample with as many refused as accepted configs, and the beginnings of errors."""
    refused = [
        (config, {"error": outcome["error"].partition("\n")[0][:60]})
        for config, outcome in results
        if "error" in outcome
    ]
    accepted = [one for one in results if "values" in one[1]]
    lines = [
        json.dumps({"config": config, **outcome}, separators=(",", ":"))
        for config, outcome in refused[: RECORDS // 2] + accepted[: RECORDS // 2]
    ]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seeds", default="0-1000")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if not (pathlib.Path(options.folder) / "deepspeed").is_dir():
        print(f"{options.folder} has no DeepSpeed: nothing is compared")
        return 0
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or int(first) + 1))
    given = configs(seeds)
    examples = [BATCH | one.example for one in DIFFERENCES]
    shown: Counter[str] = Counter()
    kept: list[tuple[dict[str, Any], Outcome]] = []
    bad = 0
    for one, outcome in zip(DIFFERENCES, theirs(options.folder, examples), strict=True):
        found = difference(outcome, ours(BATCH | one.example))
        if found is not one:
            bad += 1
            print(f"the example of {one.error!r} shows: {found}\n  DeepSpeed: {outcome}")
    outcomes = theirs(options.folder, given)
    for seed, config, outcome in zip(seeds, given, outcomes, strict=True):
        found = difference(outcome, ours(config))
        if not isinstance(found, Difference) or found.refuses == "penstock":
            kept.append((config, outcome))
        if isinstance(found, Difference):
            shown[found.error] += 1
        elif found is not None:
            bad += 1
            print(f"seed {seed}: {found}\n  {json.dumps(config)}\n  DeepSpeed: {outcome}")
        else:
            shown["same, refused" if "error" in outcome else "same, accepted"] += 1
    for name, count in shown.most_common():
        print(f"{count:6} {name}")
    if options.record:
        record(kept)
    print(f"{len(given)} configs, {bad} differences that are not in the table")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
