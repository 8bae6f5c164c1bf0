"""`mokfx demo`."""

from __future__ import annotations

import argparse

from .command import Command, positive


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2, 4), default=2, help="ranks of the second part; 1: no such"
    )
    parser.add_argument("--steps", type=positive, default=20, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")


def _run(arguments: argparse.Namespace) -> int:
    from mokfx.demo import run  # Inductor and process groups: only when asked for

    return run(arguments.ranks, arguments.steps, arguments.seed)


COMMAND = Command(
    name="demo",
    summary="compile an ordinary MoE transformer block, compare it with eager, train it",
    description="Compile an ordinary MoE transformer block with backend='mok', print what was recognised "
    "and the graph that is compiled, compare outputs and every gradient with eager, and train it beside "
    "eager: on one rank, then on several (gloo, one process each). Needs no GPU and no network, and "
    "takes under a minute.",
    add_arguments=_add_arguments,
    run=_run,
)
