"""The command ds_report: runs `penstock doctor`."""

from __future__ import annotations

from penstock.cli import main as penstock


def cli_main() -> int:
    return penstock(["doctor"])


main = cli_main

if __name__ == "__main__":
    raise SystemExit(cli_main())
