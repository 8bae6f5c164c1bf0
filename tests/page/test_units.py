"""Figures as people read them."""

from __future__ import annotations

import pytest

from mokfx.page.units import number, of_bytes, of_flops, of_seconds


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (7, "7"), (0.1234, "0.123"), (1.236, "1.24"), (15.84, "15.8"), (790.4, "790")]
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [of_bytes(v) for v in (12, 4300, 2.5e6, 4.3e12)] == ["12 B", "4.30 kB", "2.50 MB", "4.30 TB"]
    assert [of_flops(v) for v in (96, 6.18e11, 9.996e14)] == ["96 FLOP", "618 GFLOP", "1.00 PFLOP"]
    assert [of_seconds(v) for v in (2.5, 7.8e-4, 1e-3)] == ["2.50 s", "780 \u00b5s", "1 ms"]
    assert [of_seconds(v) for v in (1.58e-5, 3.1e-9)] == ["15.8 \u00b5s", "3.10 ns"]
