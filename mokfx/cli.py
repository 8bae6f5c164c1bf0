"""The console script `mokfx`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from mokfx.demo import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="mokfx",
        description="MoE layers of unmodified PyTorch models as one fused op, by torch.compile.",
    )
    parser.add_argument("--version", action="version", version=f"mokfx {version('mokfx')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="compile an ordinary MoE transformer block, compare it with eager, train it",
        description="Compile an ordinary MoE transformer block with backend='mok', print what was recognised "
        "and the graph that is compiled, compare outputs and every gradient with eager, and train it beside "
        "eager: on one rank, then on several (gloo, one process each). Needs no GPU and no network, and "
        "takes under a minute.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--ranks", type=int, choices=(1, 2, 4), default=2, help="ranks of the second part; 1: no such"
    )
    demo.add_argument("--steps", type=_positive, default=20, help="training steps")
    demo.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    demo.set_defaults(run=_demo)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


def _demo(arguments: argparse.Namespace) -> int:
    return run(arguments.ranks, arguments.steps, arguments.seed)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
