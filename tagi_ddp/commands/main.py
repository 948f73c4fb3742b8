"""The command ``tagi-ddp``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tagi_ddp import __version__
from tagi_ddp.commands.signals import end_by_signals, keep_for_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (sys.argv by default) and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="tagi-ddp", description="Train pytagi networks on many processes."
    )
    parser.add_argument("--version", action="version", version=f"tagi-ddp {__version__}")
    arguments = sys.argv[1:] if argv is None else argv
    end_by_signals()
    if arguments[:1] == ["run"]:
        keep_for_ranks()  # They may arrive before the ranks are started.
    if arguments != ["--version"]:  # The version need not wait for numpy.
        _add_commands(parser)
    options = parser.parse_args(arguments or ["--help"])
    status: int = options.command(options)
    return status


def _add_commands(parser: argparse.ArgumentParser) -> None:
    from tagi_ddp.commands import doctor, run
    from tagi_ddp.commands.parser import CommandParser
    from tagi_ddp.plan import arguments as plan

    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for command in (run, doctor, plan):
        command.add_parser(commands)
