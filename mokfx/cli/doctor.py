"""`mokfx doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from .command import Command
from .progress import progress
from .ranks import process_group, rank, told_by_each

if TYPE_CHECKING:
    from mokfx.doctor import Finding

BAD = ("missing", "failed")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object with every line")


def _run(arguments: argparse.Namespace) -> int:
    from mokfx.doctor import PROBES, Finding
    from mokfx.doctor.finding import examined

    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(process_group())
        except Exception as error:
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            remedy = "torch.distributed cannot start under torchrun: look at MASTER_ADDR and the network's names"
            findings.append(Finding("process group", said, "failed", remedy, "ranks"))
        tell = progress("doctor", shown=rank() == 0)
        for part, probe in PROBES.items():
            with tell(part):
                findings += examined(part, probe)
        every = told_by_each(findings)
        if rank() == 0:
            print(_as_json(every) if arguments.json else "\n".join(_lines(every)))
    return int(any(finding.state in BAD for each in every for finding in each))


def _as_json(every: list[list[Finding]]) -> str:
    ok = not any(finding.state in BAD for each in every for finding in each)
    return json.dumps({"ok": ok, "ranks": [[asdict(finding) for finding in each] for each in every]}, indent=2)


def _lines(every: list[list[Finding]]) -> Iterator[str]:
    """The first rank's findings; of the others, what differs."""
    yield from _report(every[0])
    for number, each in enumerate(every[1:], start=1):
        if other := [finding for finding in each if finding not in every[0]]:
            yield from ("", f"rank {number} differs:", *_report(other))
    bad = sum(finding.state in BAD for each in every for finding in each)
    yield ""
    yield "nothing is missing" if not bad else f"{bad} line{'s' if bad > 1 else ''} marked <-- with a remedy"


def _report(findings: list[Finding]) -> Iterator[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    column = min(26, max(len(finding.name) for finding in findings)) + 4
    for part, listed in groupby(findings, key=lambda finding: finding.part):
        yield part
        for finding in listed:
            mark = "  <--" if finding.state in BAD else ""
            yield from _wrapped(f"  {finding.name:<{column - 4}}  ", finding.value + mark, width, column)
            if finding.remedy:
                yield from _wrapped(" " * column, f"-> {finding.remedy}", width, column + 3)


def _wrapped(first: str, text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


COMMAND = Command(
    name="doctor",
    summary="look at this machine: versions, GPUs, compilers, caches, and what would run the op here",
    description="Look at this machine: versions, compilers, cache folders, GPUs and the links between them, symmetric "
    "memory between ranks (those of torchrun, or one started for each local GPU), and for some usual calls which "
    "provider would run the op and why the others would not. What is missing is marked and has a remedy. Exit code: 0, "
    "or 1 if something is missing or a probe failed.",
    add_arguments=_add_arguments,
    run=_run,
)
