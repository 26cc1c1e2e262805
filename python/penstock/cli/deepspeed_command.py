"""penstock deepspeed: switches an environment from DeepSpeed to Penstock, and back."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import sys
import sysconfig

from penstock._native import ConfigError
from penstock.deepspeed import FOLDER

# Command of DeepSpeed -> module and function that run it here.
COMMANDS = {
    "deepspeed": "penstock.launch:deepspeed_main",
    "ds": "penstock.launch:deepspeed_main",
    "ds_report": "penstock.cli.deepspeed_tools:report",
    "ds_bench": "penstock.cli.deepspeed_tools:bench",
    "ds_io": "penstock.cli.deepspeed_tools:io",
    "ds_nvme_tune": "penstock.cli.deepspeed_tools:nvme_tune",
    "ds_ssh": "penstock.cli.deepspeed_tools:ssh",
    "ds_elastic": "penstock.launch.elastic_batches:main",
    "ds_to_universal": "penstock.cli.deepspeed_tools:to_universal",
}
_PATH_FILE = "penstock_is_deepspeed.pth"
_MARK = "# Written by `penstock deepspeed on`."
_SCRIPT = """#!{python}
{mark}
import sys

import penstock.deepspeed

penstock.deepspeed.install()
from {module} import {function}

sys.exit({function}())
"""


def _places() -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folders of commands and of packages of this environment."""
    return pathlib.Path(sysconfig.get_path("scripts")), pathlib.Path(sysconfig.get_path("purelib"))


def _is_ours(path: pathlib.Path) -> bool:
    try:
        return _MARK in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _another() -> str:
    """Returns the version of DeepSpeed that pip installed in this environment; "" for none."""
    packages = str(_places()[1])
    found = importlib.metadata.distributions(name="deepspeed", path=[packages])
    return next((one.version for one in found), "")


def switch_on() -> list[pathlib.Path]:
    """Makes `import deepspeed` and DeepSpeed's commands use Penstock in this environment.

    Returns the files that were written. Writes nothing and raises ConfigError if DeepSpeed is
    installed or a command belongs to another program.
    """
    commands, packages = _places()
    version = _another()
    if version:
        raise ConfigError(
            f"[deepspeed::on] DeepSpeed {version} is installed in this environment, and its "
            f"commands would be replaced: run `pip uninstall deepspeed` first, or use `penstock "
            f"run --as-deepspeed`, which works beside DeepSpeed"
        )
    taken = [n for n in COMMANDS if (commands / n).exists() and not _is_ours(commands / n)]
    if taken:
        raise ConfigError(
            f"[deepspeed::on] {commands / taken[0]} belongs to another program: remove it first"
        )
    written = []
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        path = commands / name
        text = _SCRIPT.format(python=sys.executable, mark=_MARK, module=module, function=function)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        written.append(path)
    line = f"{_MARK}\n{FOLDER}\n"
    (packages / _PATH_FILE).write_text(line, encoding="utf-8")
    return [*written, packages / _PATH_FILE]


def switch_off() -> list[pathlib.Path]:
    """Removes the files that switch_on() wrote, and returns them."""
    commands, packages = _places()
    found = [one for one in (*(commands / n for n in COMMANDS), packages / _PATH_FILE)
             if _is_ours(one)]  # fmt: skip
    for path in found:
        path.unlink()
    return found


def _run(args: argparse.Namespace) -> int:
    if args.state == "on":
        files = switch_on()
        print(f"`import deepspeed` and these commands are Penstock's now, in {sys.prefix}:")
    elif args.state == "off":
        files = switch_off()
        print("removed:" if files else "there was nothing to remove")
    else:
        commands, packages = _places()
        files = [one for one in (*(commands / n for n in COMMANDS), packages / _PATH_FILE)
                 if _is_ours(one)]  # fmt: skip
        print("on:" if files else f"off{': DeepSpeed is installed' if _another() else ''}")
    for path in files:
        print(f"  {os.path.relpath(path, sys.prefix)}")
    return 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "deepspeed",
        help=summary,
        description="on: writes DeepSpeed's commands and a .pth file into this environment, so "
        "that scripts for DeepSpeed run unchanged. off: removes them. Without an argument: prints "
        "whether it is on.",
    )
    parser.add_argument("state", nargs="?", choices=("on", "off"), help="see above")
    parser.set_defaults(command=_run)
