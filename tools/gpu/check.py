"""Builds, tests and measures this tree on a machine with an accelerator and without network.

Needs a Python with torch (which runs this program), a C++ compiler and the folder that
tools/gpu_bundle made. Everything is written below --state; one JSON file has the machine, all
figures and the last output of failed stages. A call ends within --budget-s seconds; the next call
continues with the stages that are not done or whose sources have changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import machine
import prebuilt
import source_tree
import summary
from stages import DEMO, Check, Outcome, Stage, all_stages

ROOT = pathlib.Path(__file__).parents[2]
RESERVE_S = 10.0  # to write the report, and to end commands over their limit
SIZES = {"cuda": ["1.5b", "125m", "7b"]}
BUDGET_S = 520.0
DEMO_BUDGET_S = 3600.0  # the build takes most of it
BUNDLE_S = 180.0  # to make a bundle, if there is none


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", help='"cuda", "sim", ...; default: cuda if torch finds it, else sim')
    add("--bundle", type=pathlib.Path, default=ROOT / "build" / "gpu_bundle")
    add("--state", type=pathlib.Path, default=ROOT / "build" / "gpu_check")
    add("--json", type=pathlib.Path, help="the report; default: report.json in --state")
    add("--budget-s", type=float, help=f"seconds for this call (default {BUDGET_S:g})")
    add("--demo", action="store_true", help="build, train a GPT beside plain torch, print a table")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--sizes", nargs="*", help="sizes of the models for gpu_train.py")
    add("--only", nargs="+", help="words; run only stages with one in the name, and the build")
    add("--pack", type=pathlib.Path, help="write what was built to this file, for --prebuilt")
    add("--prebuilt", type=pathlib.Path, help="build nothing: take this file's binaries")
    add("--fresh", action="store_true", help="start over: delete --state, with all that was built")
    add("--retry", action="store_true", help="run failed stages again, even with unchanged sources")
    options = parser.parse_args()
    if options.demo:
        options.only = [DEMO]
    options.budget_s = options.budget_s or (DEMO_BUDGET_S if options.demo else BUDGET_S)
    return options


@dataclasses.dataclass
class Report:
    """The JSON file; written after every stage, so that a call that is cut off leaves it."""

    path: pathlib.Path
    whole: dict[str, Any]

    @classmethod
    def read(cls, path: pathlib.Path, kept: pathlib.Path) -> Report:
        """Reads the last call's results from `kept`, wherever its report was written."""
        whole: dict[str, Any] = {}
        if kept.exists():
            whole = json.loads(kept.read_text(encoding="utf-8"))
        return cls(path, {"stages": {}} | whole)

    def write(self, kept: pathlib.Path) -> None:
        text = json.dumps(self.whole, indent=1) + "\n"
        for path in {self.path, kept}:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)


def commit() -> str:
    """Returns the commit, if this is a checkout and git is installed."""
    if not (ROOT / ".git").exists():
        return ""
    return machine.first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])


def run_stage(stage: Stage, check: Check, report: Report, left_s: float) -> dict[str, Any]:
    """Runs the stage unless it is done. Returns its new entry for the report."""
    before: dict[str, Any] = report.whole["stages"].get(stage.name, {})
    same = before.get("key") == check.key
    if same and before.get("status") in ("done", "failed") and not stage.always:
        return before | {"kept": True}
    if left_s < stage.least_s:
        return {"status": "not run", "why": f"{max(0.0, left_s):.0f} s were left", "key": check.key}
    print(f"[gpu_check] {stage.name} ({min(left_s, stage.most_s):.0f} s at most)", flush=True)
    begin = time.monotonic()
    try:
        outcome = stage.run(check, min(left_s, stage.most_s))
    except (OSError, RuntimeError, ValueError) as error:
        outcome = Outcome("failed", tail=f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - begin
    earlier = before.get("seconds", 0.0) if same else 0.0
    print(f"[gpu_check] {stage.name}: {outcome.status}, {seconds:.0f} s", flush=True)
    if outcome.tail:
        print(outcome.tail[-1500:], flush=True)
    times = {"seconds": round(seconds, 1), "seconds_in_all": round(earlier + seconds, 1)}
    return {**dataclasses.asdict(outcome), **times, "key": check.key}


def chosen_stages(options: argparse.Namespace, check: Check, torch: str) -> list[Stage]:
    """Returns the stages. With --prebuilt, one that unpacks replaces those that build."""
    stages = all_stages(check)
    if not options.demo:
        stages = [stage for stage in stages if stage.name != DEMO]
    if options.prebuilt is None:
        return stages

    def unpack(check: Check, limit_s: float) -> Outcome:
        return prebuilt.unpack(check, torch, options.prebuilt)

    taken = Stage("prebuilt", unpack, prebuilt.COMPILED, 2, 60, always=True, needed=True)
    left_out = {"dependencies", "configure", "build", "build tests", "cpp tests"}
    rest = [stage for stage in stages if stage.name not in left_out]
    return [rest[0], taken, *rest[1:]]


def run_all(options: argparse.Namespace, check: Check, report: Report, deadline: float) -> None:
    kept = check.state / "report.json"
    torch = report.whole["machine"]["torch"]
    stages = chosen_stages(options, check, torch)
    bundle = source_tree.digest(check.bundle, ["manifest.json"])
    missing = ""  # a failed stage that all later ones need
    for stage in stages:
        digest = source_tree.digest(check.tree, stage.inputs)
        text = f"{digest} {bundle} {torch} {check.device} {sys.executable}"
        check.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        wanted = stage.needed or stage.always or not options.only
        if missing:
            found = {"status": "not run", "why": f"{missing} did not succeed"}
        elif not wanted and not any(word in stage.name for word in options.only):
            found = report.whole["stages"].get(stage.name, {"status": "not run", "why": "--only"})
        else:
            found = run_stage(stage, check, report, deadline - time.monotonic())
        report.whole["stages"][stage.name] = found
        report.write(kept)
        if stage.needed and found["status"] != "done" and not missing:
            missing = stage.name
    names = [stage.name for stage in stages]
    report.whole["stages"] = {name: report.whole["stages"][name] for name in names}
    report.write(kept)


def make_bundle(folder: pathlib.Path) -> None:
    """Makes the bundle if there is none and this machine has a network. A stage says so if not."""
    if (folder / "manifest.json").exists():
        return
    print(f"[gpu_check] no bundle in {folder}: tools/gpu_bundle", flush=True)
    command = [sys.executable, str(ROOT / "tools" / "gpu" / "bundle.py"), "--out", str(folder)]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=BUNDLE_S)
        said = "" if done.returncode == 0 else done.stderr.strip()[-1500:]
    except subprocess.TimeoutExpired:
        said = f"not done in {BUNDLE_S:g} s"
    if said:
        print(f"[gpu_check] it failed, and the first stage will: {said}", flush=True)


def prepared(options: argparse.Namespace) -> tuple[Check, Report]:
    if options.fresh:
        shutil.rmtree(options.state, ignore_errors=True)
    options.state.mkdir(parents=True, exist_ok=True)
    state = options.state.resolve()
    report = Report.read(options.json or state / "report.json", state / "report.json")
    found = machine.described(sys.executable, state)
    device = options.device or ("cuda" if found["devices"] else "sim")
    sizes = options.sizes or SIZES.get(device.partition(":")[0], ["tiny"])
    make_bundle(options.bundle)
    source_tree.mirror(ROOT, state / "tree")
    report.whole["machine"] = found
    report.whole["device"] = device
    report.whole["commit"] = commit()
    report.whole["calls"] = report.whole.get("calls", 0) + 1
    if options.retry:
        stages = report.whole["stages"]
        report.whole["stages"] = {k: s for k, s in stages.items() if s["status"] != "failed"}
    count = 8 if device.startswith("sim") else len(found["devices"])
    check = Check(state, options.bundle.resolve(), device, options.jobs, sizes, num_devices=count)
    return check, report


def main() -> None:
    begin = time.monotonic()
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("[gpu_check] terminated"))
    check, report = prepared(options)
    run_all(options, check, report, begin + options.budget_s - RESERVE_S)
    if options.pack:
        prebuilt.pack(check, report.whole["machine"]["torch"], options.pack)
    print(summary.of_demo(report.whole) if options.demo else summary.text(report.whole))
    print(f"[gpu_check] {time.monotonic() - begin:.0f} s")
    print(f"[gpu_check] to report: open an issue with the text above and {report.path}")
    statuses = {stage["status"] for stage in report.whole["stages"].values()}
    raise SystemExit(1 if "failed" in statuses else 0)


if __name__ == "__main__":
    main()
