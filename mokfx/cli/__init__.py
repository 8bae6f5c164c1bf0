"""The console script `mokfx`: one module a command, listed in COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from mokfx.errors import MokError

from . import bench, check, demo, doctor, explain, kernels
from .command import Command

COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    explain.COMMAND,
    check.COMMAND,
    doctor.COMMAND,
    bench.COMMAND,
    kernels.COMMAND,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    A user's mistake (a MokError) is one line on stderr and exit code 2, never a traceback.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except MokError as error:
        print(f"mokfx: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mokfx",
        description="MoE layers of unmodified PyTorch models as one fused op, by torch.compile.",
    )
    parser.add_argument("--version", action="version", version=f"mokfx {version('mokfx')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        its_parser = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_arguments(its_parser)
        its_parser.set_defaults(run=command.run)
    return parser
