"""The `jtopk` command. Its subcommands are found by entry point, since some need torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

import jtopk


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code.

    A subcommand is a module under the entry-point group `jtopk.commands` with a one-line
    docstring, `add_arguments(parser)` and `run(arguments) -> int`.
    """
    parser = argparse.ArgumentParser(prog="jtopk", description=jtopk.__doc__)
    parser.add_argument("--version", action="version", version=f"jtopk {jtopk.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    missing: dict[str, ImportError] = {}
    for entry in sorted(metadata.entry_points(group="jtopk.commands"), key=lambda e: e.name):
        try:
            module = entry.load()
        except ImportError as error:
            missing[entry.name] = error
            commands.add_parser(entry.name, help=f"(cannot run here: {error})", add_help=False)
            continue
        command = commands.add_parser(entry.name, help=module.__doc__, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    # Arguments of a command that could not be loaded are not known either.
    arguments, unknown = parser.parse_known_args(argv)
    if reason := missing.get(arguments.command):
        print(
            f"jtopk {arguments.command} cannot run here: {reason}. "
            "It needs PyTorch: pip install 'jtopk[torch]'",
            file=sys.stderr,
        )
        return 1
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return int(arguments.run(arguments))
