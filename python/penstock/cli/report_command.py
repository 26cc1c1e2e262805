"""penstock report: writes one HTML page about one run or two."""

from __future__ import annotations

import argparse
import pathlib

from penstock.monitor import report


def _report(args: argparse.Namespace) -> int:
    path = pathlib.Path(args.output) if args.output else pathlib.Path(args.run) / "report.html"
    report.write([folder for folder in (args.run, args.other) if folder is not None], path)
    print(path)
    return 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    made = commands.add_parser(
        "report",
        help=summary,
        description="Reads the folder that monitor.path names, and writes one HTML file that needs "
        "no network. This also works while the run continues, and after the run was killed.",
    )
    made.add_argument("run", metavar="RUN", help="folder of the run")
    made.add_argument(
        "other", metavar="RUN2", nargs="?", help="folder of another run to compare with"
    )
    made.add_argument("-o", "--output", metavar="FILE", help="default: report.html in RUN")
    made.set_defaults(command=_report)
