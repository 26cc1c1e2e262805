"""Plants the bugs of table.py, one at a time, in a copy of the tree; tests must notice each.

    .venv/bin/python tests/mutations/run.py [--only PATTERN] [--jobs N] [--tree FOLDER]

Exits with 1 when a bug survives. --tree keeps the copy and its build for the next run.
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
from collections.abc import Sequence

from table import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Chosen for speed: one pool of two ranks, all kinds of bugs.
TESTS = ["tests/parity/fuzz", "--seeds", "36,78,23,115,143,22,1,8"]
TIMEOUT_S = 600


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


def build(tree: pathlib.Path, jobs: int) -> None:
    """The module comes to stand beside the package's Python files."""
    command = ["cmake", "--build", "--preset", "release", "-j", str(jobs)]
    done = subprocess.run(
        [*command, "--target", "penstock", "_penstock"], cwd=tree, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"the mutated tree does not build:\n{done.stdout[-4000:]}{done.stderr}")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    module = tree / "python" / "penstock" / f"_penstock{suffix}"
    if not module.exists():
        module.symlink_to(tree / "build/release/python/src" / module.name)


def failing_test(tree: pathlib.Path, tests: Sequence[str]) -> str | None:
    """The first test that fails; None when all pass."""
    # Without `site`, so that no editable install comes before the copy.
    path = f"{tree / 'python'}{os.pathsep}{sysconfig.get_path('purelib')}"
    command = [sys.executable, "-S", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"the tests do not run:\n{done.stdout[-4000:]}{done.stderr}")
    return found.group(1).removeprefix("tests/parity/")


def plant(tree: pathlib.Path, mutation: Mutation, jobs: int) -> str | None:
    """The test that catches it."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        sys.exit(f'"{mutation.name}": {mutation.file} must hold once, and does not: {mutation.old}')
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        build(tree, jobs)
        return failing_test(tree, mutation.tests or TESTS)
    finally:
        file.write_text(text)


def run(tree: pathlib.Path, mutations: list[Mutation], jobs: int) -> int:
    copy_tree(tree)
    configure = ["cmake", "--preset", "release", "-DPENSTOCK_TESTS=OFF"]
    subprocess.run(configure, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    build(tree, jobs)
    for tests in {tuple(mutation.tests or TESTS) for mutation in mutations}:
        failed = failing_test(tree, tests)
        if failed is not None:
            sys.exit(f"{failed} fails without any mutation")
    survivors = 0
    for mutation in mutations:
        start = time.monotonic()
        caught = plant(tree, mutation, jobs)
        survivors += caught is None
        seconds = time.monotonic() - start
        print(f"{mutation.name:56} {caught or 'SURVIVED':32} {seconds:4.0f} s", flush=True)
    print(f"{len(mutations) - survivors} of {len(mutations)} caught")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose name matches this")
    parser.add_argument("--jobs", type=int, default=2, help="of the build")
    parser.add_argument("--tree", type=pathlib.Path, help="folder of the copy; kept")
    given = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if re.search(given.only, mutation.name)]
    if given.tree is not None:
        return run(given.tree.resolve(), mutations, given.jobs)
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        return run(pathlib.Path(folder), mutations, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
