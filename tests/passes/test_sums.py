"""Sums: a one-hot factor picks, indicators count, and nothing is picked out of a sum's range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mokfx.passes.bijections import keys_of
from mokfx.passes.sums import open_sum, total
from mokfx.passes.terms import ONE, Term, at, const, count, delta, integer, lin, lt, make, mul, perm, var

from .draw import Terms, World, worlds
from .evaluate import leaf, simplified
from .test_terms import MANY, assert_same_everywhere

IDS = leaf(torch.tensor([[1, 0], [3, 1], [0, 3]]), "ids", bound=4)
TABLE = leaf(torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64), "table")


def assert_sums_to(variable: Term, body: Term, wanted: Term) -> None:
    assert total(variable, body) is wanted
    assert_same_everywhere(make("sum", variable, body), wanted)


def test_picks() -> None:
    expert, token, choice = var(4), var(3), var(2)
    key = at(IDS, (), token, choice)
    assert_sums_to(expert, mul([delta(expert, key), at(TABLE, (), expert)]), at(TABLE, (), key))


def test_counts() -> None:
    expert, token, choice = var(4), var(3), var(2)
    key = at(IDS, (), token, choice)
    counted = total(token, total(choice, delta(expert, key)))
    assert counted is count(keys_of(key), expert)
    assert_same_everywhere(make("sum", token, make("sum", choice, delta(expert, key))), counted)


def test_constants() -> None:
    variable = var(5)
    assert_sums_to(variable, const(3), const(15))
    assert_sums_to(variable, integer(2), integer(10))
    assert total(integer(0), const(3)) is const(3)


def test_no_positions() -> None:
    assert_same_everywhere(make("sum", var(0), const(3)), total(var(0), const(3)))


@pytest.mark.parametrize("limit", [2, 4, 6])
def test_nothing_is_picked_beyond_the_range(limit: int) -> None:
    """`sum_{v < limit} [v == i] f(v)` is zero for i >= limit, whatever i is."""
    variable, token, choice = var(limit), var(3), var(2)
    position = lin([(token, 2), (choice, 1)])
    for index in (position, at(IDS, (), token, choice)):
        body = mul([delta(variable, index), lin([(variable, 3)], 1)])
        assert_same_everywhere(make("sum", variable, body), total(variable, body))


def test_opened_again() -> None:
    variable, other = var(3), var(2)
    body = mul([at(IDS, (), variable, other), lt(variable, integer(2))])
    closed = total(variable, body)
    fresh, inside = open_sum(closed)
    assert total(fresh, inside) is closed
    assert ONE is const(1)


@settings(MANY, max_examples=200)
@given(worlds(), st.data())
def test_sums_over_everything(world: World, data: st.DataObject) -> None:
    """Over all slots, of which there may be none: an order's positions, seen from either side."""
    sort = data.draw(st.sampled_from(world.sorts))
    row = var(sort.size)
    if row.op != "var" or world.tokens == 0:
        return
    terms = Terms(data.draw, world, [])
    expert = terms.variable(world.experts)
    body = make("mul", make("delta", sort.key_at(perm(sort, False, row)), expert), terms.real(2))
    raw = make("sum", row, body)
    assert_same_everywhere(raw, simplified(raw))
