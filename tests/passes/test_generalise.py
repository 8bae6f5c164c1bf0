"""One term for what several terms say of one expert each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mokfx.passes.generalise import generalise
from mokfx.passes.terms import Term, add, apply, at, const, integer, lin, mul, substitute, var
from mokfx.passes.value import Leaf

from .draw import Terms, World, worlds
from .evaluate import leaf, simplified
from .test_terms import MANY, assert_same_everywhere


def instances(term: Term, index: Term, count: int) -> list[Term]:
    return [substitute(term, {index: integer(e)}) for e in range(count)]


@MANY
@given(worlds(least=1), st.data())
def test_what_it_says_of_each_is_what_was_said(world: World, data: st.DataObject) -> None:
    """It may not find the term, but what it finds is right."""
    count = data.draw(st.integers(2, 4))
    terms = Terms(data.draw, world, [])
    index = var(count)
    terms.made.append(index)
    parts = instances(simplified(terms.real(3)), index, count)
    if data.draw(st.booleans()):  # and one that may be unlike the others
        parts[-1] = simplified(terms.real(2)) if index not in parts[-1].free else parts[-1]
    if any(index in part.free for part in parts):
        return
    whole = generalise(parts, index)
    if whole is not None:
        for e, part in enumerate(parts):
            assert_same_everywhere(part, substitute(whole, {index: integer(e)}))


def weights(count: int) -> list[Leaf]:
    return [leaf(torch.arange(6.0).view(2, 3) + 10 * e, f"w{e}") for e in range(count)]


def test_one_weight_each() -> None:
    token, inner, expert = var(2), var(3), var(4)
    x = leaf(torch.arange(6.0).view(2, 3), "x")
    each = weights(4)

    def part(e: int) -> Term:
        return mul([at(x, (), token, inner), apply("silu", at(each[e], (), token, inner))])

    parts = [part(e) for e in range(4)]
    whole = generalise(parts, expert)
    assert whole is not None
    for e in range(4):
        assert_same_everywhere(parts[e], substitute(whole, {expert: integer(e)}))


def test_rows_of_a_stacked_weight() -> None:
    column, expert = var(3), var(4)
    stacked = leaf(torch.arange(24.0).view(8, 3), "w")
    parts = [at(stacked, (), integer(2 * e + 1), column) for e in range(4)]
    assert generalise(parts, expert) is at(stacked, (), lin([(expert, 2)], 1), column)


def test_they_differ() -> None:
    column, expert = var(3), var(4)
    one, other, *_ = weights(4)
    odd = leaf(torch.zeros(3, 3), "odd")
    read = [at(w, (), integer(0), column) for w in (one, other, one, other)]
    assert generalise(read, expert) is None, "two experts share a weight"
    assert generalise([*read[:2], at(odd, (), integer(0), column)], expert) is None, "another shape"
    assert generalise([integer(0), integer(1), integer(3)], expert) is None, "no fixed step"
    scaled = [mul([const(e), read[0]]) for e in (1, 2, 3)]
    assert generalise(scaled, expert) is None, "another scale for each"
    assert generalise([add([read[0], const(1)]), read[1], read[0]], expert) is None, "one has a constant"
