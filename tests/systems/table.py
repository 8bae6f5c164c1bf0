"""The table of systems in the README: `python -m tests.systems.table` runs every row and writes it.

With words behind it, it runs the rows that have one of them in their names, and those that the table does not have yet.

Layers of one system that came to the same share a line. The tests of the rows compare each row with the table as it
is (`assert_in_table`), and `tests/systems/test_table.py` that it is written as this module would.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from .check import check_row
from .row import Row, Verdict

README = Path(__file__).parent.parent.parent / "README.md"
BEGIN = "<!-- systems: written by `python -m tests.systems.table` -->"
END = "<!-- /systems -->"
HEADER = "| system | layers | expert parallel | `mok.moe` | kept, or why not |\n|---|---|---|---|---|"
MODULES = ("transformers_rows", "torchtitan_rows", "deepspeed_rows")
"""Where rows are, in the order of the table."""

Cells = tuple[str, str, str, str]
"""Of a line: system, expert parallel, matched, kept or reason."""


def all_rows() -> list[Row]:
    return [row for name in MODULES for row in import_module(f"{__package__}.{name}").ROWS]


def ranks_of(row: Row) -> str:
    return f"{row.parallel}, {row.ranks} ranks" if row.ranks > 1 else "one rank"


def cells_of(row: Row, verdict: Verdict) -> Cells:
    said = "; ".join(verdict.kept) if verdict.matched else verdict.reason
    return row.system, ranks_of(row), "yes" if verdict.matched else "no", said.replace("|", "\\|")


def render(outcomes: Iterable[tuple[str, Cells]]) -> str:
    """The table: a line for each outcome, in the order in which they come."""
    lines: dict[Cells, list[str]] = {}
    for layer, cells in outcomes:
        lines.setdefault(cells, []).append(layer)
    rows = (
        f"| {system} | {', '.join(layers)} | {parallel} | {matched} | {said} |"
        for (system, parallel, matched, said), layers in lines.items()
    )
    return "\n".join((HEADER, *rows))


def written() -> str:
    """The table as the README has it."""
    found = re.search(f"{re.escape(BEGIN)}\n(.*?)\n{re.escape(END)}", README.read_text(), re.DOTALL)
    assert found, f"{README} has no line {BEGIN!r} with a line {END!r} after it"
    return found[1]


def read(table: str) -> dict[tuple[str, str, str], Cells]:
    """The outcome of each (system, layer, expert parallel) of a table."""
    outcomes: dict[tuple[str, str, str], Cells] = {}
    for line in table.splitlines()[2:]:
        system, layers, parallel, matched, said = re.split(r"(?<!\\) ?\| ?", line)[1:-1]
        for layer in layers.split(", "):
            outcomes[system, layer, parallel] = (system, parallel, matched, said)
    return outcomes


def assert_in_table(row: Row, verdict: Verdict) -> None:
    """The README says of a row what became of it."""
    cells = cells_of(row, verdict)
    said = read(written()).get((row.system, row.layer, cells[1]))
    assert said == cells, f"README: {said}; now {cells}: run `python -m tests.systems.table`"


def replace_table(text: str, table: str) -> str:
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"


def main(names: list[str]) -> None:
    rows = all_rows()
    if missing := sorted({row.missing for row in rows} - {""}):
        raise SystemExit(f"not installed: {', '.join(missing)}; `pip install -e '.[systems]'` brings them")
    said = read(written())
    outcomes: list[tuple[str, Cells]] = []
    for row in rows:
        known = said.get((row.system, row.layer, ranks_of(row)))
        if known is None or not names or any(name in row.name for name in names):
            known = cells_of(row, check_row(row))
            print(row.name, *known[2:], sep=" | ", flush=True)
        outcomes.append((row.layer, known))
    README.write_text(replace_table(README.read_text(), render(outcomes)))


if __name__ == "__main__":
    main(sys.argv[1:])
