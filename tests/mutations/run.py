"""Plants the bugs of table.py, one at a time, in a copy of the tree; a test must notice each.

    .venv/bin/python tests/mutations/run.py [--only PATTERN] [--part I/N] [--jobs N] [--tree FOLDER]

Each bug has the one test that must catch it, mostly a C++ program: then nothing but that program is
built. Exits with 1 when a bug survives or does not build. --tree keeps the copy and its build for
the next run.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

from planted import Mutation, Program, Pytest
from table import MUTATIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path("build/release")
TIMEOUT_S = 300  # a bug that makes every rank wait is caught too
# What tables_test and gtest call the first of what they complain about.
COMPLAINT = re.compile(r"^(draw \d+): |^\[  FAILED  \] (\S+?),?(?: |$)", re.MULTILINE)


class Broken(Exception):
    """What was planted does not build, or its test does not run: nothing was shown."""


def copy_tree(tree: pathlib.Path) -> None:
    """What git tracks, or would; a file that is the same keeps its time, for the build."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, tree / name
        if not source.is_file() or (target.exists() and filecmp.cmp(source, target, shallow=False)):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    if not (tree / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")


def build(tree: pathlib.Path, test: Program | Pytest, jobs: int) -> None:
    """What the test needs. The Python module comes to stand beside the package's Python files."""
    python = isinstance(test, Pytest)
    if isinstance(test, Pytest):
        targets = ["penstock", "_penstock", *test.targets]
    else:
        targets = [pathlib.Path(test.path).name]
    command = ["cmake", "--build", "--preset", "release", "-j", str(jobs), "--target", *targets]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode != 0:
        raise Broken(f"does not build:\n{done.stdout[-4000:]}{done.stderr}")
    if python:
        module = tree / "python/penstock" / f"_penstock{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not module.exists():
            module.symlink_to(tree / BUILD / "python/src" / module.name)
        check_loaded(tree)


def python_environment(tree: pathlib.Path) -> dict[str, str]:
    """For `python -S`: without `site`, no editable install comes before the copy. A test may start
    another Python, with `site`: tests/mutations/site is for that one."""
    folders = (tree / "tests/mutations/site", tree / "python", sysconfig.get_path("purelib"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def check_loaded(tree: pathlib.Path) -> None:
    """That Python loads what was built in the copy."""
    code = "import penstock; penstock.ConfigError; print(open('/proc/self/maps').read())"
    for flags in (["-S"], []):
        done = subprocess.run(
            [sys.executable, *flags, "-c", code],
            cwd=tree,
            env=python_environment(tree),
            capture_output=True,
            text=True,
        )
        loaded = set(re.findall(r"\S*/_?(?:lib)?penstock[^/\s]*\.so$", done.stdout, re.MULTILINE))
        built = str(tree / BUILD) + os.sep
        if len(loaded) != 2 or not all(path.startswith(built) for path in loaded):
            raise Broken(f"Python loads {sorted(loaded)}, not what {built} holds:\n{done.stderr}")


def run_test(tree: pathlib.Path, test: Program | Pytest) -> subprocess.CompletedProcess[str]:
    if isinstance(test, Pytest):
        command = [sys.executable, "-S", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = python_environment(tree)
    else:
        command = [str(tree / BUILD / test.path)]
        environment = {**os.environ, "GTEST_FAIL_FAST": "1", "GTEST_BRIEF": "1"}
    return subprocess.run(
        [*command, *test.arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def complaint(tree: pathlib.Path, test: Program | Pytest) -> str | None:
    """The first test that fails; None when all pass."""
    try:
        done = run_test(tree, test)
    except subprocess.TimeoutExpired:
        return f"nothing within {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    if isinstance(test, Program):
        name = pathlib.Path(test.path).name
        found = COMPLAINT.search(done.stdout)
        if found is not None:
            return f"{name} {found.group(1) or found.group(2)}"
        if done.returncode < 0:
            return f"{name} signal {-done.returncode}"
    else:
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if found is not None:
            return found.group(1).removeprefix("tests/parity/")
    raise Broken(f"its test does not run:\n{done.stdout[-4000:]}{done.stderr}")


def plant(tree: pathlib.Path, mutation: Mutation, jobs: int) -> str | None:
    """The test that catches it."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise Broken(f"{mutation.file} must hold once, and does not: {mutation.old}")
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        build(tree, mutation.test, jobs)
        return complaint(tree, mutation.test)
    finally:
        file.write_text(text)


def check_without(tree: pathlib.Path, tests: list[Program | Pytest], jobs: int) -> None:
    """A test that fails anyway shows nothing."""
    for test in tests:
        build(tree, test, jobs)
        failed = complaint(tree, test)
        if failed is not None:
            raise Broken(f"{failed} fails without any mutation")


def run(tree: pathlib.Path, mutations: list[Mutation], jobs: int) -> int:
    copy_tree(tree)
    # A bug then costs the compilation of one source, not of a batch.
    configure = ["cmake", "--preset", "release", "-DPENSTOCK_UNITY=OFF"]
    subprocess.run(configure, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    try:
        check_without(tree, list(dict.fromkeys(mutation.test for mutation in mutations)), jobs)
    except Broken as error:
        sys.exit(str(error))
    caught = 0
    for mutation in mutations:
        start = time.monotonic()
        try:
            by = plant(tree, mutation, jobs)
            caught += by is not None
        except Broken as error:
            by = f"NOT SHOWN: {error}"
        seconds = time.monotonic() - start
        print(f"{mutation.name:64} {seconds:4.0f} s  {by or 'SURVIVED'}", flush=True)
    print(f"{caught} of {len(mutations)} caught")
    return 0 if caught == len(mutations) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose name matches this")
    parser.add_argument("--part", default="1/1", help="1/4: the first quarter of them")
    parser.add_argument("--jobs", type=int, default=2, help="of the build")
    parser.add_argument("--tree", type=pathlib.Path, help="folder of the copy; kept")
    given = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if re.search(given.only, mutation.name)]
    part, parts = map(int, given.part.split("/"))
    first, end = ((i * len(mutations)) // parts for i in (part - 1, part))
    mutations = mutations[first:end]
    if given.tree is not None:
        given.tree.mkdir(parents=True, exist_ok=True)
        return run(given.tree.resolve(), mutations, given.jobs)
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        return run(pathlib.Path(folder), mutations, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
