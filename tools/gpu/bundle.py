"""Collects what a machine without network needs to build and test this tree, except torch, Python
and a C++ compiler.

Sources come from Debian or Ubuntu (from where this machine takes its packages), Python packages
from PyPI as wheels for Linux on x86-64. Existing files are kept if the manifest says that they are
what is needed. The bundle must be small enough to be sent along with the tree: more than
--limit-mib is an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[2]
MANIFEST = "manifest.json"
LIMIT_MIB = 40.0

# Debian source packages, for their upstream releases; binary packages that have only headers.
SOURCES = ("highway", "liburing", "googletest", "xxhash")
HEADERS = ("nlohmann-json3-dev",)
COMPONENTS = {"Debian": ("main",), "Ubuntu": ("main", "universe")}
# Dependencies are added. Versions are those of the requirements files, if they have them.
WHEELS = ("pytest", "pytest-timeout", "psutil", "safetensors", "ninja", "cmake==3.31.*")
# Python on the GPU machine. It only decides which dependencies the wheels have.
PYTHON_VERSION = "3.12"


def run(command: list[str], folder: pathlib.Path | None = None) -> str:
    """Returns the command's output. If the command fails, ends the program with that text."""
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"[gpu_bundle] {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def pinned(names: Iterable[str]) -> list[str]:
    """Returns the names with their versions in the requirements files."""
    files = [ROOT / f"requirements-{name}.txt" for name in ("build", "dev")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    return [f"{name}=={pins[name]}" if name in pins else name for name in names]


# ---- Debian


def source_lists(work: pathlib.Path) -> list[str]:
    """Returns options with which apt-get also knows source packages, from separate lists in `work`.
    The system's configuration does not change."""
    wanted = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]
    found = []
    for origin, components in COMPONENTS.items():
        for component in components:
            which = ["Created-By: Packages", f"Component: {component}", f"Origin: {origin}"]
            found += run([*wanted, *which]).splitlines()
    if not found:
        raise SystemExit(
            "[gpu_bundle] apt-get knows no repository of Debian or Ubuntu: run apt-get update"
        )
    lines = [f"deb-src {place}\n" for place in dict.fromkeys(found)]
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "sources.list").write_text("".join(lines), encoding="utf-8")
    places = {"SourceList": "sources.list", "SourceParts": "no-parts"}
    options = [f"-oDir::Etc::{name}={work / place}" for name, place in places.items()]
    options += [f"-oDir::State::Lists={work / 'lists'}", "-oAPT::Sandbox::User=root", "-qq"]
    (work / "no-parts").mkdir()
    return options


def take_sources(bundle: pathlib.Path, work: pathlib.Path) -> None:
    options = source_lists(work)
    run(["apt-get", *options, "update"])
    run(["apt-get", *options, "source", "--download-only", "--tar-only", *SOURCES], bundle)


def take_headers(bundle: pathlib.Path, work: pathlib.Path) -> None:
    """Stores header packages as archives of their `usr/`, so that unpacking needs no dpkg."""
    run(["apt-get", "-qq", "-oAPT::Sandbox::User=root", "download", *HEADERS], work)
    for package in HEADERS:
        (found,) = work.glob(f"{package}_*.deb")
        version = found.name.split("_")[1].split("-")[0]
        name = f"{package}-{version}"
        run(["dpkg-deb", "-x", str(found), str(work / name)])
        shutil.rmtree(work / name / "usr" / "share" / "doc")
        run(["tar", "-czf", str(bundle / f"{name}.tar.gz"), "-C", str(work), name])


# ---- PyPI


def take_wheels(bundle: pathlib.Path, python: str) -> None:
    platforms = ["manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"]
    command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version", PYTHON_VERSION]
    command += [f"--platform={name}" for name in platforms]
    run([*command, "--dest", str(bundle), *pinned(WHEELS)])


# ---- the whole


def asked() -> dict[str, object]:
    """Returns what a bundle is made of. If this changes, a new bundle is made."""
    wheels = pinned(WHEELS)
    return {"sources": SOURCES, "headers": HEADERS, "wheels": wheels, "python": PYTHON_VERSION}


def described(path: pathlib.Path) -> dict[str, object]:
    if path.suffix == ".whl":
        name, version = path.name.split("-")[:2]
        origin = "PyPI"
    else:
        name, version = re.split(r"[-_](?=\d)", path.name.removesuffix(".tar.gz"), maxsplit=1)
        origin = "apt"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "name": name,
        "version": version.removesuffix(".orig"),
        "origin": origin,
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": digest,
    }


def is_current(bundle: pathlib.Path) -> bool:
    """Whether the manifest has what asked() returns, and every file is as it says."""
    path = bundle / MANIFEST
    if not path.exists():
        return False
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["asked"] != json.loads(json.dumps(asked())):
        return False
    files = [bundle / entry["file"] for entry in manifest["files"]]
    return all(file.exists() for file in files) and manifest["files"] == list(map(described, files))


def collect(bundle: pathlib.Path, python: str) -> None:
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        take_sources(bundle, work)
        take_headers(bundle, work)
    take_wheels(bundle, python)
    files = [described(path) for path in sorted(bundle.iterdir())]
    text = json.dumps({"asked": asked(), "files": files}, indent=1)
    (bundle / MANIFEST).write_text(text + "\n", encoding="utf-8")


def show(bundle: pathlib.Path, limit_mib: float) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    print(f"{'what':<22}{'version':<12}{'from':<8}{'KiB':>8}  file")
    for entry in manifest["files"]:
        kib = entry["bytes"] / 1024
        what = f"{entry['name']:<22}{entry['version']:<12}{entry['origin']:<8}"
        print(f"{what}{kib:>8.0f}  {entry['file']}")
    total = sum(entry["bytes"] for entry in manifest["files"]) / 2**20
    print(f"{total:.1f} MiB of {limit_mib:g} in {bundle}")
    if total > limit_mib:
        raise SystemExit(f"[gpu_bundle] {total:.1f} MiB are more than {limit_mib:g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/gpu_bundle", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "gpu_bundle")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="default %(default)g")
    parser.add_argument("--fresh", action="store_true", help="download everything again")
    options = parser.parse_args()
    if platform.machine() != "x86_64":
        print("[gpu_bundle] its programs are for x86-64, whatever this machine is")
    if options.fresh or not is_current(options.out):
        collect(options.out, sys.executable)
    show(options.out, options.limit_mib)


if __name__ == "__main__":
    main()
