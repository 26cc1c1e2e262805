"""`deepspeed --autotuning`: measures short runs of a script with different configs.

The planner orders ZeRO stages and offload choices by predicted step time. The best few are run with
several micro-batch sizes. A run ends after a few steps, which rank 0 times (`after_step`). Files
and folders have DeepSpeed's names.
"""

from __future__ import annotations

import argparse
import base64
import copy
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock._native import ConfigError, _penstock
from penstock.launch.messages import LOG

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_MICRO = "train_micro_batch_size_per_gpu"
_TOKENS = 4096.0  # of a rank and step, for the planner
_BEST = 3  # choices of the planner that are run
_NO_EFFECT = (
    *("fast", "tuner_type", "tuner_early_stopping", "mp_size", "model_info", "model_info_path"),
    *("metric_path", "min_train_batch_size"),
)
_RUN = "import sys; from penstock.launch import autotuning; sys.exit(autotuning.run_one(sys.argv))"


@dataclasses.dataclass
class Settings:
    """The keys of the section "autotuning" that have an effect, with DeepSpeed's defaults."""

    enabled: bool = True
    results_dir: str = "autotuning_results"
    exps_dir: str = "autotuning_exps"
    overwrite: bool = True
    start_profile_step: int = 3
    end_profile_step: int = 5
    metric: str = "throughput"
    min_train_micro_batch_size_per_gpu: int = 1
    max_train_micro_batch_size_per_gpu: int = 1024
    num_tuning_micro_batch_sizes: int = 3
    max_train_batch_size: int | None = None
    tuner_num_trials: int = 50
    arg_mappings: dict[str, str] | None = None

    @staticmethod
    def of(section: dict[str, Any]) -> Settings:
        """Raises ConfigError for an unknown key or metric."""
        names = {field.name for field in dataclasses.fields(Settings)}
        unknown = sorted(set(section) - names - set(_NO_EFFECT))
        if unknown:
            raise ConfigError(f'[launch::autotuning] there is no key "autotuning.{unknown[0]}"')
        idle = sorted(set(section) & set(_NO_EFFECT))
        if idle:
            LOG.warning(f'these keys of "autotuning" have no effect: {", ".join(idle)}')
        made = Settings(**{key: one for key, one in section.items() if key in names})
        if made.metric not in ("throughput", "latency"):
            raise ConfigError(
                f'[launch::autotuning] "autotuning.metric" is "{made.metric}"; allowed: '
                f'"throughput", "latency"'
            )
        if not 0 < made.start_profile_step < made.end_profile_step:
            raise ConfigError(
                '[launch::autotuning] "start_profile_step" must be above 0 and below '
                '"end_profile_step"'
            )
        return made


def _place_of_config(words: list[str]) -> tuple[int, str]:
    """Returns the index of the word with the config, and the part of this word before the
    config."""
    for index, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in ("--deepspeed_config", "--deepspeed") and equals:
            return index, flag + "="
        after = words[index + 1] if index + 1 < len(words) else "--"
        if word == "--deepspeed_config" or (word == "--deepspeed" and after[:1] != "-"):
            return index + 1, ""
    raise ConfigError(
        "[launch::autotuning] the script's arguments have no --deepspeed_config FILE (or "
        "--deepspeed FILE): add one with the config to start from"
    )


def _read(text: str) -> dict[str, Any]:
    if not os.path.isfile(text):
        text = base64.urlsafe_b64decode(text).decode()
    else:
        text = pathlib.Path(text).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(_penstock.plain_json(text))
    return found


def _remove_experiments(folder: pathlib.Path) -> None:
    """Removes what an earlier search wrote: folders with exp.json, experiments, and summaries."""
    for one in folder.iterdir():
        if one.is_dir() and (one / "exp.json").is_file():
            shutil.rmtree(one)
        elif one.name in ("summary.txt", "ds_config_optimal.json", "cmd_optimal.txt") or (
            one.suffix == ".json" and '"result_dir"' in one.read_text(encoding="utf-8")
        ):
            one.unlink()


class Tuner:
    """One search. `tune()` measures; then `best` has the fastest experiment."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._at, self._before = _place_of_config(args.args)
        self._config = _read(args.args[self._at].removeprefix(self._before))
        self._settings = Settings.of(self._config.pop("autotuning", None) or {})
        self._results = pathlib.Path(self._settings.results_dir).absolute()
        self._exps = pathlib.Path(self._settings.exps_dir).absolute()
        self._records: list[dict[str, Any]] = []
        for folder in (self._results, self._exps):
            if folder.exists() and self._settings.overwrite:
                _remove_experiments(folder)
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def best(self) -> dict[str, Any] | None:
        """The experiment with the best metric; None if none ended well."""
        sign = 1 if self._settings.metric == "throughput" else -1
        done = [one for one in self._records if one["metric_val"] is not None]
        return max(done, key=lambda one: sign * one["metric_val"], default=None)

    def tune(self) -> None:
        """Runs the config as it is, then the planner's best choices."""
        start = time.monotonic()
        first = self._measure("z_given", copy.deepcopy(self._config), ask=True)
        world = (first or {}).get("world", 1)
        for name, zero in self._choices(first):
            for micro in self._micro_sizes(world):
                if len(self._records) >= self._settings.tuner_num_trials:
                    break
                config = copy.deepcopy(self._config)
                kept = {key: one for key, one in config.get("zero_optimization", {}).items()
                        if key not in ("offload_optimizer", "offload_param")}  # fmt: skip
                config["zero_optimization"] = {**kept, **zero}
                config.pop("train_batch_size", None)
                config[_MICRO] = micro
                if not isinstance(config.get("gradient_accumulation_steps"), int):
                    config["gradient_accumulation_steps"] = 1
                if self._measure(f"{name}_tmbspg{micro}", config) is None:
                    break  # larger micro-batches need more memory
        self._write(time.monotonic() - start)

    def _choices(self, first: dict[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields name and section "zero_optimization" of the planner's best choices."""
        found = (first or {}).get("alternatives", [])
        usable = [one for one in found
                  if one["fits"] and one["strategy"] in _STAGES and one["gradients"] == "none"
                  and {one["optimizer"], one["params"]} <= {"none", "host"}]  # fmt: skip
        if not usable:
            LOG.warning("the planner has no prediction for this model: stages 0 to 3 are run")
            usable = [{"strategy": name, "optimizer": "none", "params": "none"} for name in _STAGES]
        usable.sort(key=lambda one: one.get("seconds", 0.0))
        for one in usable[: _BEST if "seconds" in usable[0] else None]:
            stage = _STAGES[one["strategy"]]
            zero: dict[str, Any] = {"stage": stage}
            name = f"z{stage}"
            for key, tier in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
                if one[tier] == "host":
                    zero[key] = {"device": "cpu"}
                    name += f"_{key}"
            yield name, zero

    def _micro_sizes(self, world: int) -> list[int]:
        given = self._config.get(_MICRO)
        least = max(self._settings.min_train_micro_batch_size_per_gpu, 1)
        most = self._settings.max_train_micro_batch_size_per_gpu
        steps = self._config.get("gradient_accumulation_steps")
        steps = steps if isinstance(steps, int) else 1
        if self._settings.max_train_batch_size:
            most = min(most, self._settings.max_train_batch_size // world // steps)
        size = max(least, given if isinstance(given, int) else 1)
        sizes = [size * 2**i for i in range(self._settings.num_tuning_micro_batch_sizes)]
        return [one for one in sizes if one <= most]

    def _words(self, config: dict[str, Any], path: pathlib.Path) -> list[str]:
        """Returns the script's arguments with another config, and with values of arg_mappings."""
        words = list(self._args.args)
        words[self._at] = f"{self._before}{path}"
        for key, flag in (self._settings.arg_mappings or {}).items():
            if key in config:
                at = words.index(flag) if flag in words else len(words)
                words[at : at + 2] = [flag, str(config[key])]
        return words

    def _measure(
        self, name: str, config: dict[str, Any], ask: bool = False
    ) -> dict[str, Any] | None:
        """Runs one experiment. Returns its measurements; None if it failed."""
        folder = self._results / name
        folder.mkdir(parents=True, exist_ok=True)
        metrics, path = folder / "metrics.json", folder / "ds_config.json"
        kept = self._settings
        config["autotuning"] = {
            "enabled": True,
            "start_profile_step": kept.start_profile_step,
            "end_profile_step": kept.end_profile_step,
            "metric_path": str(metrics),
            **({"model_info": {"profile": True}} if ask else {}),
        }
        path.write_text(json.dumps(config, indent=4), encoding="utf-8")
        given = {key: one for key, one in vars(self._args).items() if key != "command"}
        given |= {"autotuning": "", "args": self._words(config, path)}
        given |= {"save_pid": False, "end_with_stdin": True}
        record = {"name": name, "ds_config": config, "result_dir": str(folder), "metric_val": None}
        for place in (self._exps / f"{name}.json", folder / "exp.json"):
            place.write_text(json.dumps(record, indent=4), encoding="utf-8")
        command = shlex.join(["deepspeed", self._args.script, *given["args"]])
        (folder / "cmd.txt").write_text(f"{command}\n", encoding="utf-8")
        LOG.info(f"autotuning: {name}")
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
            words = [sys.executable, "-c", _RUN, json.dumps(given)]
            # The ranks end with this process, because its end of the pipe then closes.
            made = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=err)
            code = made.wait()
        found = json.loads(metrics.read_text(encoding="utf-8")) if metrics.is_file() else None
        record["metric_val"] = found[kept.metric] if found else None
        self._records.append(record)
        if not found:
            why = f"ended with {code}" if code else "ended before the steps to measure"
            LOG.warning(f"autotuning: {name} {why}: see {folder / 'stderr.log'}")
        return found

    def _write(self, took: float) -> None:
        """Writes the summary, the best config and the best command."""
        rows = [f"| {one['name']} | {one['metric_val']} |" for one in self._records]
        head = [f"| experiment | {self._settings.metric} |", "|---|---|"]
        best = self.best
        name = best["name"] if best else "none"
        last = f"best: {name} of {len(self._records)} experiments, in {took:.0f} s"
        text = "\n".join([*head, *rows, "", last])
        (self._results / "summary.txt").write_text(f"{text}\n", encoding="utf-8")
        print(text)
        if best is None:
            return
        config = {key: one for key, one in best["ds_config"].items() if key != "autotuning"}
        path = self._results / "ds_config_optimal.json"
        path.write_text(json.dumps(config, indent=4), encoding="utf-8")
        words = ["deepspeed", self._args.script, *self._words(config, path)]
        (self._results / "cmd_optimal.txt").write_text(f"{shlex.join(words)}\n", encoding="utf-8")
        print(f"the best config is in {path}")

    def run_best(self, run: Callable[[argparse.Namespace], int]) -> int:
        """Runs the script with the best config."""
        assert self.best is not None
        path = self._results / "ds_config_optimal.json"
        args = argparse.Namespace(**vars(self._args))
        args.args, args.autotuning = self._words(self.best["ds_config"], path), ""
        return run(args)


def tune(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Searches, and with "run" runs the script with the best config. Returns the exit code, 1 if no
    experiment ended well."""
    tuner = Tuner(args)
    tuner.tune()
    if tuner.best is None:
        return 1
    return tuner.run_best(run) if args.autotuning == "run" else 0


def run_one(argv: list[str]) -> int:
    """Runs one experiment. The options are a JSON text."""
    from penstock.launch import command  # noqa: PLC0415 - it imports this module

    return command.run(argparse.Namespace(**json.loads(argv[1])))


# ---- in the ranks


_STEPS = ("start_profile_step", "end_profile_step")


def after_step(engine: Any, section: dict[str, Any]) -> None:
    """Times the steps of an experiment. After the last one rank 0 writes the file `metric_path`,
    and every rank ends.

    Args:
        engine: a DeepSpeedEngine that has finished a step.
        section: the section "autotuning" of its config.
    """
    path = section.get("metric_path")
    if not path or not section.get("enabled"):
        return
    kept = Settings.of({key: section[key] for key in _STEPS if key in section})
    first, last = kept.start_profile_step, kept.end_profile_step
    done = getattr(engine, "_autotuning_steps", 0)  # a loaded checkpoint may begin at any step
    engine._autotuning_steps = done + 1
    if done + 1 == first:
        engine._autotuning_start = time.perf_counter()
    if done + 1 < last:
        return
    latency = (time.perf_counter() - engine._autotuning_start) / (last - first)
    if engine.global_rank == 0:
        found = {"latency": latency, "throughput": engine.train_batch_size() / latency}
        found |= {"world": engine.world_size}
        if section.get("model_info"):
            found["alternatives"] = _alternatives(engine)
        draft = pathlib.Path(f"{path}.part")
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.replace(path)
    raise SystemExit(0)


def _alternatives(engine: Any) -> list[dict[str, Any]]:
    from penstock.front import module_tree  # noqa: PLC0415 - it imports torch

    tree = module_tree.model_tree(engine._model, {})
    asked = _penstock.Config({"precision": engine.native.config.precision})
    report = _penstock.plan_report(tree, asked, engine.world_size, _TOKENS, _penstock.Machine())
    found: list[dict[str, Any]] = report["alternatives"]
    return found
