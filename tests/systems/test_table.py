"""The README's table of systems is what its command writes.

What a line says of a row is compared where the row runs (`assert_in_table`); here, that the table has every row and
no other, in the words and the order of the command.
"""

from __future__ import annotations

import pytest

from .table import all_rows, ranks_of, read, render, written

pytest.importorskip("transformers")  # whose blocks are found by reading it


def test_has_each_row_once() -> None:
    names = [(row.system, row.layer, ranks_of(row)) for row in all_rows()]
    assert len(set(names)) == len(names)
    assert not [row.layer for row in all_rows() if ", " in row.layer or "|" in row.layer]


def test_is_as_the_command_writes_it() -> None:
    said = read(written())
    rows = [(row.system, row.layer, ranks_of(row)) for row in all_rows()]
    assert set(said) == set(rows)
    assert written() == render((row[1], said[row]) for row in rows)
