"""`mokfx check`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .command import Command
from .factory import HELP as FACTORY_HELP
from .factory import FactoryError, blamed_on, make
from .progress import progress
from .ranks import HELP as RANKS_HELP
from .ranks import process_group, rank, told_by_each

if TYPE_CHECKING:
    from mokfx.check import CheckResult


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", help=FACTORY_HELP)
    parser.add_argument(
        "--tolerance", type=_units, default=3.0, metavar="UNITS", help="the largest error allowed, in units of eager's"
    )
    parser.add_argument("--no-grad", action="store_true", help="outputs only, in torch.no_grad()")
    parser.add_argument(
        "--all", action="store_true", help="a row for each gradient, where many are shown as the worst of a group"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with every number")


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from mokfx.check.sides import COMPILED, checked

    with process_group():
        made = make(arguments.factory)
        told = progress("check", shown=rank() == 0)
        doing = ""

        @contextlib.contextmanager
        def tell(what: str) -> Iterator[None]:
            nonlocal doing
            doing = what
            with blamed_on(f"the model, {what},"), told(what):
                yield

        try:
            with torch.set_grad_enabled(not arguments.no_grad):
                result = checked(made.model, made.args, made.kwargs, tell)
        except FactoryError as error:
            if doing not in COMPILED:
                raise
            print(f"mokfx check: not good: {error}; eager it did not", file=sys.stderr)
            return 1
        results = told_by_each(replace(result, tolerance=arguments.tolerance))
        if rank() == 0:
            print(_as_json(results) if arguments.json else _as_text(results, arguments.all))
    return 0 if all(result.ok for result in results) else 1


def _as_json(results: list[CheckResult]) -> str:
    ok = all(result.ok for result in results)
    return json.dumps({"ok": ok, "ranks": [result.as_dict() for result in results]}, indent=2)


def _as_text(results: list[CheckResult], every: bool) -> str:
    """The first rank's table, and of the others the verdict, with the table if it is bad."""
    width = max(60, shutil.get_terminal_size().columns)
    if len(results) == 1:
        return results[0].text(width, every)
    parts = []
    for number, result in enumerate(results):
        body = result.text(width, every) if number == 0 or not result.ok else "\n".join(result.verdict(width))
        parts.append(f"rank {number} of {len(results)}:\n{body}")
    return "\n\n".join(parts)


def _units(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


COMMAND = Command(
    name="check",
    summary="compare outputs and every gradient, compiled against eager and float64",
    description="Run a model eager, compiled by mokfx, compiled and run again, and in float64, from the same state and "
    "inputs, and print how far each output and each gradient is from float64: eager, compiled, and compiled in units "
    "of eager's error, so that 1 is as good as eager. The float64 run repeats eager's choices of experts. "
    + RANKS_HELP
    + " The worst rank decides. Exit code: 0 good; 1 a difference, other bits in the second run, or no layer that was "
    "rewritten; 2 a mistake in the arguments or in the model.",
    add_arguments=_add_arguments,
    run=_run,
)
