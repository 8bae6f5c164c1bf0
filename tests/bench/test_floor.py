"""The floor is that of the larger resource, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mokfx.bench.floor import Ceilings, floor, measure_ceilings
from mokfx.bench.shapes import parse

from .layers import ALONE

H200 = Ceilings(790e12, 4.3e12, None)
LINKED = Ceilings(790e12, 4.3e12, 450e9)


@pytest.mark.parametrize(
    ("name", "ranks", "ceilings", "backward", "milliseconds", "limit"),
    [
        ("qwen3-30b", 1, H200, False, 0.783, "products"),  # 6 * 8192 * 8 * 2048 * 768 / 790e12
        ("qwen3-30b", 1, H200, True, 2.348, "products"),
        ("kimi-k2@1024", 1, H200, False, 7.872, "memory"),  # 33.82 GB of weights and 0.03 of rows
        ("kimi-k2@1024", 1, H200, True, 23.61, "memory"),
        ("qwen3-30b", 2, LINKED, False, 0.783, "products"),
        ("olmoe", 8, LINKED, False, 0.864, "link"),  # 33.6 MB * (7 * (1 - (7/8)^8) + 8 * 7/8) / 450e9
    ],
)
def test_the_slowest_resource_decides(
    name: str, ranks: int, ceilings: Ceilings, backward: bool, milliseconds: float, limit: str
) -> None:
    if name == "olmoe":  # products take 1.04 ms here; a card twice as fast waits for the link
        ceilings = Ceilings(ceilings.products * 2, ceilings.memory, ceilings.link)
    found = floor(parse(name), ranks, ceilings, backward)
    assert found.limit == limit
    assert found.milliseconds == pytest.approx(milliseconds, rel=2e-3)


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(ALONE, calls=1, groups=2)
    assert found.products > 1e6 and found.memory > 1e6 and found.link is None
