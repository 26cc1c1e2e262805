"""tools/gpu_check: what is done stays done until its sources change; nothing outlives its time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "gpu"))

sys.path.append(str(ROOT / "benchmarks"))

import check  # noqa: E402
import source_tree  # noqa: E402
import stages  # noqa: E402
import summary  # noqa: E402
from running import Runner  # noqa: E402


@pytest.mark.parametrize("tool", ["gpu_bundle", "gpu_check"])
def test_help(tool):
    command = [str(ROOT / "tools" / tool), "--help"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_a_tree_that_was_sent_again_keeps_its_times(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "src").mkdir(parents=True)
    (source / "build").mkdir()
    for name in ("src/a.cpp", "src/b.cpp", "build/left_out"):
        (source / name).write_text(name, encoding="utf-8")
    source_tree.mirror(source, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.cpp")}
    digest = source_tree.digest(copy, ["src"])
    assert len(before) == 2 and not (copy / "build").exists()
    os.utime(source / "src" / "a.cpp", (1e9, 1e9))
    source_tree.mirror(source, copy)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.cpp")} == before
    assert source_tree.digest(copy, ["src"]) == digest
    (source / "src" / "b.cpp").unlink()
    source_tree.mirror(source, copy)
    assert not (copy / "src" / "b.cpp").exists() and source_tree.digest(copy, ["src"]) != digest


def test_a_command_ends_with_all_that_it_started(tmp_path):
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    runner = Runner(tmp_path, tmp_path / "logs", {"GREETING": "hello"})
    begin = time.monotonic()
    done = runner.run("slow", [sys.executable, "-c", script], 0.5)
    assert done.timed_out and not done.good and time.monotonic() - begin < 30
    done = runner.run("quick", ["sh", "-c", "echo $GREETING; exit 3"], 30)
    assert (done.code, done.timed_out, done.text()) == (3, False, "hello\n")


@pytest.fixture
def run_once(tmp_path):
    """One stage, with what the report has of it; how often it ran."""
    report = check.Report(tmp_path / "report.json", {"stages": {}})
    of = stages.Check(tmp_path, tmp_path, "cpu", 1, [])
    outcomes, ran = [], []

    def body(_, limit_s):
        ran.append(limit_s)
        return outcomes.pop()

    stage = stages.Stage("one", body, (), least_s=5, most_s=20)

    def run(key, outcome="done", left_s=100.0):
        of.key, outcomes[:] = key, [stages.Outcome(outcome)]
        found = check.run_stage(stage, of, report, left_s)
        report.whole["stages"]["one"] = found
        return found["status"], len(ran)

    return run


def test_what_is_done_is_kept_until_its_sources_change(run_once):
    assert run_once("a", left_s=2.0) == ("not run", 0)
    assert run_once("a", "out of time") == ("out of time", 1)
    assert run_once("a") == ("done", 2)
    assert run_once("a") == ("done", 2)
    assert run_once("b", "failed") == ("failed", 3)
    assert run_once("b") == ("failed", 3)
    assert run_once("a") == ("done", 4)


def test_summary_names_what_failed():
    machine = dict.fromkeys(["driver", "cuda", "torch", "python", "compiler", "processor"], "x")
    machine |= {"devices": [], "cores": 2, "memory_gib": 1, "available_gib": 1, "disk_free_gib": 1}
    found = {
        "device": "sim",
        "commit": "",
        "machine": machine,
        "stages": {
            "build": {"status": "failed", "seconds_in_all": 3.0, "tail": "error: no such thing"},
            "link": {"status": "not run", "why": "2 s were left"},
        },
    }
    text = summary.text(json.loads(json.dumps(found)))
    assert "error: no such thing" in text and "2 s were left" in text


def test_the_order_of_stages(tmp_path):
    names = [
        stage.name for stage in stages.all_stages(stages.Check(tmp_path, tmp_path, "cpu", 1, []))
    ]
    expected = ["import", "demo", "first steps", "launches", "link", "max model", "device tests"]
    assert [name for name in names if name in expected] == expected
    assert "ranks" not in names, "one device"
    of = stages.Check(tmp_path, tmp_path, "cuda", 1, ["1.5b"], num_devices=2)
    names = [stage.name for stage in stages.all_stages(of)]
    assert names.index("link") < names.index("train 1.5b") < names.index("max model")
    assert names.index("max model") < names.index("ranks") < names.index("cpp tests")


def test_the_demo_prints_its_table_or_why_there_is_none():
    machine = dict.fromkeys(["driver", "cuda", "torch", "python", "compiler", "processor"], "x")
    machine |= {"devices": [], "cores": 2, "memory_gib": 1, "available_gib": 1, "disk_free_gib": 1}
    found = {"device": "sim", "commit": "", "machine": machine}
    done = {"status": "done", "figures": {"printed": "ms/step\n"}}
    assert summary.of_demo(found | {"stages": {"demo": done}}).endswith("ms/step")
    failed = {"build": {"status": "failed", "tail": "error: no such thing"}}
    assert "no such thing" in summary.of_demo(found | {"stages": failed})


# ---- what the stages run


@pytest.fixture(scope="module")
def benchmarks():
    """The modules of benchmarks/, which need torch."""
    pytest.importorskip("torch")
    import gpu_launches  # noqa: PLC0415
    import gpu_runs  # noqa: PLC0415
    import watched  # noqa: PLC0415

    return SimpleNamespace(gpu_launches=gpu_launches, gpu_runs=gpu_runs, watched=watched)


def test_a_trace_is_counted(benchmarks):
    pageable = "Memcpy DtoH (Device -> Pageable)"
    found = benchmarks.gpu_launches.counted(
        [
            {"cat": "kernel", "name": "void gemm<float>", "dur": 1500.0},
            {"cat": "kernel", "name": "reduce_kernel<512, double>", "dur": 500.0},
            {"cat": "gpu_memcpy", "name": pageable, "args": {"bytes": 8}},
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 64}},
            {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
            {"cat": "cpu_op", "name": "aten::mm"},
            {"ph": "M"},
        ]
    )
    assert (found["kernels"], found["fp64_kernels"], found["kernel_ms"]) == (2, 1, 2.0)
    assert (found["pageable_copies"], found["copies"][pageable]) == (1, [1, 8])
    assert (found["waits"], found["operators"]) == ({"cudaStreamSynchronize": 1}, 1)


def test_trainers_share_a_process_as_far_as_memory_allows(benchmarks):
    runs, gib = benchmarks.gpu_runs, 2.0**30
    size = runs.SIZES["1.5b"]
    names = ["torch bf16", "ours device", "ours host optimizer", "ours all on disk"]
    together, skipped = runs.processes(names, size, (80 * gib, 100 * gib, 100 * gib))
    assert together == [names[:3], names[3:]] and not skipped
    together, skipped = runs.processes(names, size, (45 * gib, 10 * gib, 100 * gib))
    assert together == [["torch bf16"], ["ours device"], ["ours all on disk"]]
    assert "of host needed" in skipped["ours host optimizer"]
    two, four = (runs.needed("ours zero3", size, world)[0] for world in (2, 4))
    assert two == 2 * four
    assert 1.0 <= runs.pinned_rounding(size.model) < 2.0


def test_a_process_is_watched(benchmarks, tmp_path, monkeypatch):
    watched, script = benchmarks.watched, tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "json.dump({'step_s': [1.0]}, open(sys.argv[-1], 'w'))\n"
        "sys.exit('no such device') if 'fail' in sys.argv else time.sleep(60)\n",
        encoding="utf-8",
    )
    found = watched.run([str(script), "fail"], 30)
    assert found["step_s"] == [1.0]
    assert watched.last_line(found["error"]) == "no such device (exit code 1)"
    found = watched.run([str(script)], 2)
    assert "time: not done in 2 s" in watched.last_line(found["error"])
    free = iter([100 * watched.GIB] * 2 + [watched.GIB] * 99)
    monkeypatch.setattr(watched.accelerator, "available_bytes", lambda: next(free))
    found = watched.run([str(script)], 30)
    assert "memory: 1.0 GiB were left" in watched.last_line(found["error"])


def run_benchmark(tmp_path, script, *arguments):
    """What it wrote, on the simulated device."""
    pytest.importorskip("torch")
    path = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--device", "sim"]
    done = subprocess.run(
        [*command, *arguments, "--json", str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


def test_ranks_on_devices_of_their_own(tmp_path):
    trainers = ["FSDP2", "ours zero3", "ours zero2", "ours zero1", "DDP"]
    few = ["--sizes", "64mb", "--rounds", "2", "--trainers", *trainers, "DeepSpeed-3"]
    found, printed = run_benchmark(tmp_path, "gpu_ranks.py", *few)
    by_name = found["by_size"]["64mb"]
    assert found["ranks"] == 2 and list(by_name) == trainers, printed
    for name, one in by_name.items():
        assert one["gap"] < 0.01 and one["rounds"] == 2 and one["device_bytes"] > 0, name
    assert set(by_name["ours zero3"]["beside"]) == set(trainers) - {"ours zero3"}
    assert set(found["skipped"]["64mb"]) == {"DeepSpeed-3"}


def test_the_demo_trains_beside_plain_torch(tmp_path):
    found, printed = run_benchmark(tmp_path, "gpu_demo.py", "--budget-s", "60")
    theirs, ours = (found["by_trainer"][name]["losses"] for name in ("plain torch", "Penstock"))
    assert len(theirs) == len(ours) and found["gap"] < 0.02
    assert "tokens/s" in printed and "of the time" in printed
