"""The stages of a check: what each one runs, and which figures it reads from the output."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

from running import Done, Runner

SOURCES = ("CMakeLists.txt", "cmake", "include", "plugins", "src", "python")
TESTS = ("tests", "benchmarks", "examples", "pyproject.toml")
DEMO = "demo"
CMAKE_AT_LEAST = (3, 25)


@dataclasses.dataclass
class Check:
    """What all stages share."""

    state: pathlib.Path
    bundle: pathlib.Path
    device: str
    jobs: int
    sizes: list[str]
    num_devices: int = 1
    key: str = ""  # what the result of the running stage depends on

    def __post_init__(self) -> None:
        self.tree = self.state / "tree"
        self.build = self.tree / "build" / "release"
        self.prefix = self.state / "prefix"
        self.packages = self.state / "packages"
        self.site = self.state / "site"
        self.figures = self.state / "figures"
        self.kind = self.device.partition(":")[0]
        self.runner = Runner(self.tree, self.state / "logs", self._environment())

    def _environment(self) -> dict[str, str]:
        folders = [self.site, self.packages]
        return {
            "PYTHONPATH": ":".join(map(str, folders)),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PENSTOCK_TEST_DEVICE": self.kind,
            "PENSTOCK_SIM_BUILD": str(self.build / "tests" / "device"),
            "PENSTOCK_AS_DEEPSPEED": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }


@dataclasses.dataclass
class Outcome:
    """The result of a stage."""

    status: str  # "done", "failed", or "out of time"
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    tail: str = ""

    @classmethod
    def of(cls, done: Done, **figures: Any) -> Outcome:
        if done.good:
            return cls("done", figures)
        return cls("out of time" if done.timed_out else "failed", figures, done.tail())


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a check. It is not started if less than `least_s` is left, and is ended after
    `most_s`. `inputs` are the sources on which its result depends."""

    name: str
    run: Callable[[Check, float], Outcome]
    inputs: tuple[str, ...]
    least_s: float
    most_s: float
    always: bool = False  # run it even if it is done; it finds what is left to do
    needed: bool = False  # later stages need it


# ---- environment


def _unpack_wheel(wheel: pathlib.Path, target: pathlib.Path) -> None:
    """Unpacks a wheel as pip --target does: data schemes at the top, programs executable."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib|data)/", "", entry.filename)
            name = re.sub(r"^[^/]+\.data/scripts/", "bin/", name)
            if entry.is_dir():
                continue
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))
            if (entry.external_attr >> 16) & stat.S_IXUSR:
                path.chmod(0o755)


def environment(check: Check, limit_s: float) -> Outcome:
    """Unpacks the bundle: wheels into one folder of packages, sources side by side."""
    manifest = check.bundle / "manifest.json"
    if not manifest.exists():
        return Outcome("failed", tail=f"no bundle in {check.bundle}: make it with tools/gpu_bundle")
    for folder in (check.packages, check.state / "sources"):
        shutil.rmtree(folder, ignore_errors=True)
    versions = {}
    for entry in json.loads(manifest.read_text(encoding="utf-8"))["files"]:
        file = check.bundle / entry["file"]
        versions[entry["name"]] = entry["version"]
        if file.suffix == ".whl":
            _unpack_wheel(file, check.packages)
            continue
        with tarfile.open(file) as archive:
            archive.extractall(check.state / "sources", filter="data")
    return Outcome("done", {"bundled": versions, "cmake": cmake(check)})


def _program(check: Check, name: str, bundled: pathlib.Path, at_least: tuple[int, int]) -> str:
    """Returns the bundle's program if it runs here, else this machine's. Raises RuntimeError."""
    for path in (str(bundled), shutil.which(name) or ""):
        try:
            done = check.runner.run(f"{name}-version", [path, "--version"], 20)
        except OSError:
            continue
        found = re.search(r"(\d+)\.(\d+)", done.text())
        if done.good and found and tuple(map(int, found.groups())) >= at_least:
            return path
    raise RuntimeError(f"no {name} of {at_least} or newer, neither in the bundle nor here")


def cmake(check: Check) -> str:
    bundled = check.packages / "cmake" / "data" / "bin" / "cmake"
    return _program(check, "cmake", bundled, CMAKE_AT_LEAST)


def _configure(check: Check, source: pathlib.Path, build: pathlib.Path) -> list[str]:
    ninja = _program(check, "ninja", check.packages / "bin" / "ninja", (1, 10))
    command = [cmake(check), "-S", str(source), "-B", str(build), "-G", "Ninja"]
    return [*command, f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]


def dependencies(check: Check, limit_s: float) -> Outcome:
    source = check.tree / "tools" / "gpu" / "dependencies"
    build = check.state / "dependencies"
    configure = _configure(check, source, build)
    configure += [f"-DSOURCES={check.state / 'sources'}", "-DCMAKE_INSTALL_LIBDIR=lib"]
    done = check.runner.run("dependencies-configure", configure, limit_s)
    if done.good:
        command = [cmake(check), "--build", str(build), "--parallel", str(check.jobs)]
        done = check.runner.run("dependencies-build", command, limit_s)
    if done.good:
        command = [cmake(check), "--install", str(build), "--prefix", str(check.prefix)]
        done = check.runner.run("dependencies-install", command, limit_s)
    return Outcome.of(done)


# ---- build


def _cuda_folders(check: Check) -> list[pathlib.Path]:
    """Returns the folders of libraries that a CUDA build of torch installs as separate packages.
    The linker needs those that libtorch_cpu.so uses."""
    script = "import torch; print(torch.__path__[0])"
    done = check.runner.run("torch-folder", [sys.executable, "-c", script], 120)
    folder = pathlib.Path(done.text().splitlines()[-1]).parent / "nvidia"
    return sorted({path.parent for path in folder.glob("**/lib*.so*")})


def configure(check: Check, limit_s: float) -> Outcome:
    linked = ",".join(f"-rpath-link,{folder}" for folder in _cuda_folders(check))
    flags = f"-Wl,{linked}" if linked else ""
    command = _configure(check, check.tree, check.build)
    command += [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_PREFIX_PATH={check.prefix}",
        f"-DCMAKE_CXX_FLAGS=-isystem {check.prefix / 'include'}",
        f"-DCMAKE_EXE_LINKER_FLAGS={flags}",
        "-DPENSTOCK_WERROR=OFF",
        "-DPENSTOCK_TESTS=ON",
    ]
    return Outcome.of(check.runner.run("configure", command, limit_s))


def _built(check: Check, name: str, targets: list[str], limit_s: float) -> tuple[Done, Any]:
    """Builds all of these that compiles, even if something does not."""
    command = [cmake(check), "--build", str(check.build), "--parallel", str(check.jobs)]
    done = check.runner.run(name, [*command, "--target", *targets, "--", "-k", "0"], limit_s)
    text = done.text()
    figures: dict[str, Any] = {"warnings": len(re.findall(r": warning: ", text))}
    errors = [line for line in text.splitlines() if re.search(r"\berror: |undefined ref", line)]
    if errors:
        figures["errors"] = errors[:40]
    return done, figures


def build(check: Check, limit_s: float) -> Outcome:
    """Builds and installs what Python needs; the C++ tests, most of the build, come last."""
    targets = ["_penstock", "penstock_bench", *(["_sim"] if check.kind == "sim" else [])]
    done, figures = _built(check, "build", targets, limit_s)
    command = [cmake(check), "--install", str(check.build), "--prefix", str(check.site)]
    installed = check.runner.run("install", [*command, "--component", "python"], 60)
    package = check.site / "penstock"
    shutil.copytree(check.tree / "python" / "penstock", package, dirs_exist_ok=True)
    if done.good and not installed.good:
        done = installed
    return Outcome.of(done, **figures)


def build_tests(check: Check, limit_s: float) -> Outcome:
    done, figures = _built(check, "build-tests", ["all"], limit_s)
    return Outcome.of(done, **figures)


def imports(check: Check, limit_s: float) -> Outcome:
    """Whether the module loads beside this torch."""
    script = "import penstock; print(penstock.__version__)"
    done = check.runner.run("import", [sys.executable, "-c", script], limit_s)
    return Outcome.of(done, version=done.text().strip()[-40:])


# ---- tests


def cpp_tests(check: Check, limit_s: float) -> Outcome:
    ctest = str(pathlib.Path(cmake(check)).with_name("ctest"))
    command = [ctest, "--test-dir", str(check.build), "--output-on-failure"]
    command += ["--timeout", "120", "--parallel", str(max(1, check.jobs // 2))]
    if check.kind != "sim":
        command += ["--exclude-regex", "simulated|device_tables"]  # they test the simulated device
    done = check.runner.run("ctest", command, limit_s, {"OMP_NUM_THREADS": "2"})
    text = done.text()
    failed = re.findall(r"^\s+\d+ - (\S+) \(", text, re.MULTILINE)
    passed = len(re.findall(r"^ *\d+/\d+ .* Passed ", text, re.MULTILINE))
    return Outcome.of(done, passed=passed, failed=failed)


def device_tests(check: Check, limit_s: float) -> Outcome:
    """Runs tests/device, except tests that passed in an earlier call with the same sources."""
    passed_file = check.state / f"passed-{check.key}.json"
    passed = json.loads(passed_file.read_text(encoding="utf-8")) if passed_file.exists() else []
    command = [sys.executable, "-m", "pytest", "-v", "-p", "pytest_timeout", "--color=no"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "tests/device"]
    if check.kind != "sim":
        command += ["--ignore", "tests/device/test_simulated.py"]
    command += [f"--deselect={name}" for name in passed]
    done = check.runner.run("tests-device", command, limit_s)
    results = re.findall(
        r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", done.text(), re.MULTILINE
    )
    by_result = {
        kind: sorted({name for name, result in results if result == kind})
        for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    passed = sorted({*passed, *by_result["PASSED"]} - {*by_result["ERROR"]})
    passed_file.write_text(json.dumps(passed), encoding="utf-8")
    figures = {
        "passed": len(passed),
        "failed": by_result["FAILED"] + by_result["ERROR"],
        "skipped": len(by_result["SKIPPED"]),
    }
    outcome = Outcome.of(done, **figures)
    if done.code == 5 and passed:  # nothing was left to select
        outcome = Outcome("done", figures)
    return outcome


# ---- benchmarks


IMPORT_S = 20.0  # of a benchmark's modules, before its budget begins, and to end
UNFINISHED = 3  # exit code of a benchmark that had time only for a part


def benchmark(script: str, *arguments: str) -> Callable[[Check, float], Outcome]:
    """Returns a stage that runs benchmarks/`script`, which ends by itself within its budget. The
    script continues from its file of an earlier call with the same sources."""

    def run(check: Check, limit_s: float) -> Outcome:
        name = "-".join([pathlib.Path(script).stem, *(a for a in arguments if a[0] != "-")])
        path = check.figures / f"{name}-{check.key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, f"benchmarks/{script}", "--device", check.device, *arguments]
        command += ["--budget-s", f"{max(10.0, limit_s - IMPORT_S):.0f}", "--json", str(path)]
        done = check.runner.run(name, command, limit_s)
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        outcome = Outcome.of(done, **written)
        if done.code == UNFINISHED:
            outcome.status = "out of time"
        outcome.figures["printed"] = done.tail()
        return outcome

    return run


def all_stages(check: Check) -> list[Stage]:
    """Returns the stages in the order in which they run: what says most in the least time first."""
    compiled = (*SOURCES, *TESTS)
    stages = [
        Stage("environment", environment, ("tools/gpu",), 5, 60, needed=True),
        Stage("dependencies", dependencies, ("tools/gpu/dependencies",), 20, 300, needed=True),
        Stage("configure", configure, ("tools/gpu", *compiled), 10, 120, True, True),
        Stage("build", build, compiled, 20, 7200, always=True),
        Stage("import", imports, compiled, 5, 60, needed=True),
        dataclasses.replace(_measured(DEMO, "gpu_demo.py", (60, 120)), always=True),
        _measured("first steps", "gpu_first.py", (40, 120)),
        _measured("launches", "gpu_launches.py", (60, 200)),
        _measured("link", "gpu_link.py", (30, 120)),
        *(_training(size) for size in check.sizes),
        _measured("max model", "gpu_max_model.py", (90, 480)),
    ]
    if check.num_devices > 1:
        stages.append(_measured("ranks", "gpu_ranks.py", (90, 480)))
    return [
        *stages,
        Stage("device tests", device_tests, compiled, 30, 3600),
        Stage("build tests", build_tests, compiled, 20, 7200),
        Stage("cpp tests", cpp_tests, compiled, 20, 600),
    ]


def _training(size: str) -> Stage:
    most_s = {"125m": 120.0, "1.5b": 210.0}.get(size, 300.0)
    return _measured(f"train {size}", "gpu_train.py", (60, most_s), "--go-on", "--size", size)


def _measured(name: str, script: str, seconds: tuple[float, float], *arguments: str) -> Stage:
    inputs = (*SOURCES, "benchmarks", "examples/gpt.py", "examples/train_gpt.py")
    return Stage(name, benchmark(script, *arguments), inputs, *seconds)
