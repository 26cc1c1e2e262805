"""`deepspeed --autotuning`: a search, its folders, and its settings."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from penstock import ConfigError
from penstock.launch.autotuning import Settings, Tuner, _place_of_config, after_step

_SCRIPT = """
import argparse, deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--micro", type=int, default=1)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
engine = deepspeed.initialize(args=args, model=model)[0]
micro = engine.train_micro_batch_size_per_gpu()
if micro > 1 or args.micro not in (1, micro):
    raise SystemExit(3)  # as if there were not enough memory
for step in range(6):
    loss = engine(torch.ones(micro, 32)).square().mean()
    engine.backward(loss)
    engine.step()
print("ran", engine.global_steps, micro)
"""
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "autotuning": {
        "start_profile_step": 1,
        "end_profile_step": 3,
        "num_tuning_micro_batch_sizes": 2,
        "tuner_num_trials": 3,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--micro"},
        "fast": True,
    },
}


def test_search_and_run(tmp_path):
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(_CONFIG))
    code = "from penstock.launch import deepspeed_main; raise SystemExit(deepspeed_main())"
    words = [sys.executable, "-c", code, "--num_gpus", "1", "--autotuning", "run", "train.py"]
    env = {key: one for key, one in os.environ.items() if not key.startswith("PENSTOCK")}
    done = subprocess.run(
        [*words, "--deepspeed_config", "ds.json"],
        cwd=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = tmp_path / "autotuning_results"
    runs = sorted(one.name for one in results.iterdir() if one.is_dir())
    assert len(runs) == 3 and "z_given" in runs, runs
    for name in runs:
        held = {one.name for one in (results / name).iterdir()}
        assert {"ds_config.json", "exp.json", "cmd.txt", "stdout.log", "stderr.log"} <= held
        assert (tmp_path / "autotuning_exps" / f"{name}.json").is_file()
        assert ("metrics.json" in held) == (not name.endswith("_tmbspg2")), name
    given = json.loads((results / "z_given" / "metrics.json").read_text())
    assert given["world"] == 1 and given["throughput"] == pytest.approx(1 / given["latency"])
    # On one rank zero1 and zero2 are the same table as ddp; the planner names each table once.
    assert {one["strategy"] for one in given["alternatives"]} >= {"ddp", "zero3"}
    best = json.loads((results / "ds_config_optimal.json").read_text())
    assert "autotuning" not in best
    summary = (results / "summary.txt").read_text()
    assert "of 3 experiments" in summary and '"autotuning" have no effect: fast' in done.stderr
    command = (results / "cmd_optimal.txt").read_text()
    micro = best["train_micro_batch_size_per_gpu"]
    assert f"--micro {micro}" in command and f"ran 6 {micro}" in done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--deepspeed", "ds.json"], (1, "")),
        (["--deepspeed", "--deepspeed_config", "c"], (2, "")),
        (["--x", "--deepspeed_config=c"], (1, "--deepspeed_config=")),
    ],
)
def test_the_config_is_found_in_the_arguments(words, found):
    assert _place_of_config(words) == found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"metric": "flops"}, 'metric" is "flops"'),
        ({"resultsdir": "a"}, 'no key "autotuning.resultsdir"'),
        ({"start_profile_step": 5}, "below"),
    ],
)
def test_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        Settings.of(section)
    with pytest.raises(ConfigError, match="no --deepspeed_config"):
        _place_of_config(["--deepspeed"])


def test_folders_can_be_chosen():
    made = Settings.of({"results_dir": str(pathlib.Path("a")), "overwrite": False})
    assert (made.results_dir, made.exps_dir, made.overwrite) == ("a", "autotuning_exps", False)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_search_removes_only_what_an_earlier_one_wrote(tmp_path, overwrite, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, exps = tmp_path / "autotuning_results", tmp_path / "autotuning_exps"
    mine = [results / "notes.txt", results / "mine" / "log.txt", exps / "own.json"]
    theirs = [results / "z0" / "exp.json", results / "summary.txt", exps / "z0.json"]
    for file in (*mine, *theirs):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"result_dir": 1}' if file in theirs else "{}")
    config = {"autotuning": {"overwrite": overwrite}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    Tuner(argparse.Namespace(args=["train.py", "--deepspeed_config", "ds.json"]))
    assert all(file.exists() for file in mine)
    assert [file.exists() for file in theirs] == [not overwrite] * 3


@pytest.mark.parametrize("begin", [0, 40])  # 40: a checkpoint was loaded
def test_an_experiment_ends_after_its_steps(begin, tmp_path):
    path = tmp_path / "metrics.json"
    section = {"enabled": True, "metric_path": str(path), "start_profile_step": 2,
               "end_profile_step": 4}  # fmt: skip
    engine = types.SimpleNamespace(
        global_rank=0, world_size=2, global_steps=begin, train_batch_size=lambda: 8
    )
    after_step(engine, {**section, "enabled": False})
    for _ in range(3):
        after_step(engine, section)
    assert not path.exists()
    with pytest.raises(SystemExit):
        after_step(engine, section)
    found = json.loads(path.read_text())
    assert found["world"] == 2 and found["throughput"] == pytest.approx(8 / found["latency"])
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.json"]
