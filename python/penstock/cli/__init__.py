"""The command line: one module for each command, and `main` of the script `penstock`."""

from penstock.cli.commands import main as main
