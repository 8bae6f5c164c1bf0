"""One number for how far a tensor is from what it should be."""

from __future__ import annotations

import math

import pytest
import torch

from mokfx.check.measure import error, far_rows, same_bits


def test_it_is_relative_to_a_row_and_takes_the_worst_one() -> None:
    exact = torch.ones(100, 4, dtype=torch.float64)
    found = exact.clone()
    found[17] += 0.5
    assert error(found, exact) == pytest.approx(0.5)
    assert error(found * 1000, exact * 1000) == pytest.approx(0.5)
    assert far_rows(found, exact, 0.4) == (1, 100)
    assert far_rows(found, exact, 0.6) == (0, 100)


def test_equal_is_zero_also_where_it_is_infinite_or_empty() -> None:
    masked = torch.tensor([[1.0, -math.inf], [2.0, 3.0]], dtype=torch.float64)
    assert error(masked.clone(), masked) == 0.0
    assert error(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)) == 0.0
    assert error(torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)) == 0.0


def test_not_a_number_is_never_good() -> None:
    exact = torch.ones(2, 2, dtype=torch.float64)
    found = exact.clone()
    found[0, 0] = math.nan
    assert not error(found, exact) <= 1e300
    assert far_rows(found, exact, 1e300) == (1, 2)
    assert not error(torch.full((2, 2), math.inf), exact) <= 1e300


def test_what_is_missing_is_zero() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert error(None, exact) == 1.0
    assert error(None, torch.zeros(3, dtype=torch.float64)) == 0.0
    assert error(torch.ones(3), torch.zeros(3, dtype=torch.float64)) == math.inf


def test_bits() -> None:
    a = torch.tensor([0.0, math.nan, 1.0])
    assert same_bits(a, a.clone())
    assert same_bits(None, None)
    assert not same_bits(a, None)
    assert not same_bits(a, torch.tensor([-0.0, math.nan, 1.0]))
    assert not same_bits(a, a.double())
    assert same_bits(torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.bfloat16))
