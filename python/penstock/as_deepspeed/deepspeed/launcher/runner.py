"""The `deepspeed` command: runs `penstock run --as-deepspeed`."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.launch import arguments, exports, hostfile

EXPORT_ENVS = list(exports.PREFIXES)  # a script may add to it
DLTS_HOSTFILE = hostfile.DEFAULT


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Returns the slots of each host in a hostfile; None if there is no such file."""
    if not os.path.isfile(hostfile_path):
        return None
    return {host.name: host.slots for host in hostfile.read_hostfile(hostfile_path)}


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    return {one.name: one.slots for one in hostfile.parse_hostfile(hostfile_lines, "hostfile")}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Returns, by host, the slots that --include or --exclude leaves.

    Raises ValueError for an invalid filter, as `penstock run` does.
    """
    hosts = [
        hostfile.Host(name, max(slots, default=-1) + 1, "host_info")
        for name, slots in host_info.items()
    ]
    nodes = hostfile.kept(hosts, include_str, exclude_str)
    kept = {node.name: [one for one in node.slots if one in host_info[node.name]] for node in nodes}
    return {name: slots for name, slots in kept.items() if slots}


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int]]:
    """Returns, by host, the slots of fetch_hostfile() that --include and --exclude leave."""
    return parse_resource_filter(
        {name: range(slots) for name, slots in resource_pool.items()}, inclusion, exclusion
    )


def encode_world_info(world_info: Any) -> str:
    """Returns the JSON text, encoded in base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line of `deepspeed`. Options not given have DeepSpeed's defaults."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    arguments.add_options(parser, "deepspeed")
    parser.set_defaults(hostfile=DLTS_HOSTFILE, launcher="pdsh", master_port=29500)
    found = parser.parse_args(args)
    found.user_script, found.user_args, found.as_deepspeed = found.script, found.args, True
    return found


def main(args: Sequence[str] | None = None) -> int:
    """Starts the ranks of a script. Returns the exit code.

    Raises ValueError or RuntimeError for options that contradict each other, or if the launcher
    cannot run on this machine.
    """
    from penstock.launch import command  # noqa: PLC0415 - importing this module stays cheap

    given = command.parse(sys.argv[1:] if args is None else args)
    given.export_prefixes = EXPORT_ENVS
    if not given.hostfile and os.path.isfile(DLTS_HOSTFILE):
        given.hostfile = DLTS_HOSTFILE
    return command.run(given)
