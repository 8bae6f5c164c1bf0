"""The MoE layers of Hugging Face transformers become one `mok.moe` each."""

from __future__ import annotations

import pytest

from .check import check_row
from .row import Row
from .table import assert_in_table
from .transformers_rows import ROWS

pytest.importorskip("transformers")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row) -> None:
    assert_in_table(row, check_row(row))
