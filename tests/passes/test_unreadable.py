"""A graph that the pass cannot run on its fake tensors stays as it was, and the report says where it ended."""

from __future__ import annotations

from typing import Any

import pytest

from mokfx.passes.rules.table import RULES

from .composed import outcome_of
from .models import Layer, inputs, seeded


def test_the_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Any) -> None:
        raise ZeroDivisionError("by nothing\nand more lines")

    monkeypatch.setitem(RULES, "aten.sort", fails)
    record = outcome_of(seeded(Layer), inputs(6))
    (miss,) = record.outcome.misses
    assert not record.outcome.matches
    assert miss.reason == "the graph cannot be read beyond this line: ZeroDivisionError: by nothing"
    assert miss.where.startswith("models.py:")
    assert miss.code == "order = flat.argsort(stable=True)"
    assert record.modules[-1].code == record.before[-1]
