"""Elements of tensors and what programs compute from them; indicators, which are 1 or 0."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from mokfx.passes.terms.index import bound, div, integer, minus, mod, plus
from mokfx.passes.terms.rows import fold_sorted, seg, start
from mokfx.passes.terms.sizes import at_most
from mokfx.passes.terms.term import CONDITIONS, Term, factors_of, make, match, terms_of


def const(value: float) -> Term:
    return make("const", float(value))


def at(leaf: Any, away: tuple[Any, ...], *index: Term) -> Term:
    """Element `index` of the tensor `leaf`, on this rank or across the exchanges `away`."""
    return fold_sorted(make("at", leaf, away, *index))


def choose(condition: Term, a: Term, b: Term) -> Term:
    """Index `a` where an indicator is 1, `b` where it is 0."""
    if a is b or condition.op == "const":
        return b if condition is const(0) else a
    return make("choose", condition, a, b)


def nonzero(number: Term) -> Term:
    """1.0 where a number is not 0, else 0.0."""
    return make("nonzero", number)


def delta(a: Term, b: Term) -> Term:
    """1.0 where two indices are equal, else 0.0."""
    if a is b:
        return const(1)
    if a.op == b.op == "int":
        return const(a.args[0] == b.args[0])
    for first, second in ((a, b), (b, a)):
        if first.op == "choose" or (first.op == "lin" and second.op == "int"):
            from mokfx.passes.indicators import delta_of_choice, place_of

            if second is integer(0) and place_of(first) is not None:
                return lt(first, integer(1))
            chosen = delta_of_choice(first, second) if first.op == "choose" else None
            if chosen is not None:
                return chosen
    for first, second in ((a, b), (b, a)):
        if first.op == "lin" and first.args[0] == 0 and second.op != "lin" and len(first.args[1]) == 2:
            (high, stride), (low, one) = sorted(first.args[1], key=lambda part: part[1] == 1)
            limit = bound(low)
            if one == 1 and high.op == low.op == "var" and limit is not None and at_most(limit, stride):
                return mul([delta(high, div(second, stride)), delta(low, mod(second, stride))])
    return make("delta", *sorted((a, b)))


def lt(a: Term, b: Term) -> Term:
    """1.0 where index `a` is smaller than `b`, else 0.0."""
    if b.op == "size":
        b = integer(b.args[0])
    if a.op == "choose":
        from mokfx.passes.indicators import lt_of_choice

        known = lt_of_choice(a, b)
        if known is not None:
            return known
    gap = minus(b, a)
    if gap.op == "int" and (isinstance(gap.args[0], int) or at_most(gap.args[0], 0) or at_most(1, gap.args[0])):
        return const(at_most(1, gap.args[0]))
    limit = bound(a)
    if limit is not None and b.op == "int" and at_most(limit, b.args[0]):
        return const(1)
    most = bound(b)
    if most is not None and a.op == "int" and at_most(most - 1, a.args[0]):
        return const(0)
    if b.op == "count" and (
        _place_in_segment(a, *b.args) or (a is integer(0) and match(b.args[0].body, b.args[1], {}))
    ):
        return const(1)
    if a.op == "perm" and a.args[0].rows_are(b, a.args[1]):
        return const(1)
    return make("lt", a, b)


def _place_in_segment(place: Term, keys: Any, key: Term) -> bool:
    """Whether `place` counts a row of `key` from the first row of `key`."""
    if place.op != "lin":
        return False
    first = start(keys, key)
    row = plus(place, first)
    return row.op != "lin" and row is not place and seg(keys, row) is key


def valid(condition: Term, term: Term) -> Term:
    """`term` where `condition` holds; elsewhere an unspecified number (whatever the program left there).

    The indicators that a product is made with stay what they are: `valid(c, k * f)` is `k * valid(c, f)`. So the
    condition matters only where they are 1; and that a factor is not 0 is no condition, for where it is 0, so is
    the product.
    """
    from mokfx.passes.indicators import given

    conditions = set(factors_of(condition))
    if term.op == "valid":
        conditions |= set(factors_of(term.args[0]))
        term = term.args[1]
    parts = factors_of(term)
    numbers = {uncast(part) for part in parts}
    condition = mul(given(c, parts) for c in conditions if c.op != "nonzero" or c.args[0] not in {*parts, *numbers})
    return term if condition is const(1) else make("valid", condition, term)


def uncast(term: Term) -> Term:
    """A number before it was rounded: where it is 0, so is what it was rounded to."""
    while term.op == "cast":
        term = term.args[0]
    return term


def parts_of(term: Term) -> list[Term]:
    """The factors of a product, also of a rounded one; a factor keeps its own casts."""
    inner = uncast(term)
    return [f for part in inner.args for f in parts_of(part)] if inner.op == "mul" else [term]


def mul(factors: Iterable[Term]) -> Term:
    """A product, flattened and in one order; indicators are 0 or 1, so one of them counts once."""
    flat: list[Term] = []
    scale = 1.0
    conditions: list[Term] = []
    todo = list(factors)
    while todo:
        factor = todo.pop()
        if factor.op == "mul":
            todo.extend(factor.args)
        elif factor.op == "const":
            scale *= factor.args[0]
        elif factor.op == "valid":
            conditions.append(factor.args[0])
            todo.append(factor.args[1])
        else:
            flat.append(factor)
    if scale == 0.0 and not conditions:
        return const(0)
    if scale != 1.0:
        flat.append(const(scale))
    indicators = {f for f in flat if f.op in CONDITIONS}
    if _contradict(indicators):
        return const(0)
    if indicators and len(flat) > 1:
        from mokfx.passes.indicators import under

        known = under(flat)
        if known != flat:
            return reduce(lambda term, condition: valid(condition, term), conditions, mul(known))
    flat = sorted([f for f in flat if f not in indicators] + list(indicators))
    result = const(1) if not flat else flat[0] if len(flat) == 1 else make("mul", *flat)
    return reduce(lambda term, condition: valid(condition, term), conditions, result)


def _contradict(indicators: set[Term]) -> bool:
    """Whether one index is asked to be two different numbers."""
    wanted: dict[Term, Term] = {}
    for f in indicators:
        if f.op == "delta":
            number, key = f.args if f.args[0].op == "int" else reversed(f.args)
            if number.op == "int" and wanted.setdefault(key, number) is not number:
                return True
    return False


def add(terms: Iterable[Term]) -> Term:
    flat: list[Term] = []
    partial: list[Term] = []
    offset = 0.0
    conditions: list[Term] = []
    todo = list(terms)
    while todo:
        term = todo.pop()
        if term.op == "add":
            todo.extend(term.args)
        elif term.op == "const":
            offset += term.args[0]
        elif term.op == "valid":
            partial.append(term)
        else:
            flat.append(term)
    if len({term.args[0] for term in partial}) == 1:
        # Terms that hold where another does not stay apart: each may be picked on its own.
        conditions.append(partial[0].args[0])
        partial = [term.args[1] for term in partial]
    flat += [part for term in partial for part in terms_of(term)]
    if offset != 0.0:
        flat.append(const(offset))
    flat.sort()
    result = const(0) if not flat else flat[0] if len(flat) == 1 else make("add", *flat)
    return reduce(lambda term, condition: valid(condition, term), conditions, result)


def apply(name: str, *args: Any) -> Term:
    """A named pointwise function; it passes through `valid`."""
    conditions = [a.args[0] for a in args if isinstance(a, Term) and a.op == "valid"]
    bare = tuple(a.args[1] if isinstance(a, Term) and a.op == "valid" else a for a in args)
    return reduce(lambda term, condition: valid(condition, term), conditions, make(name, *bare))


ZERO, ONE = const(0), const(1)
