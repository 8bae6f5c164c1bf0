"""What an indicator tells the other factors of its product: where it is zero, they do not count.

So under `delta(v, X)` a factor may be read at v = X, under any indicator the same indicator inside of a
factor is 1, and under `lt(P, C)` the index P is a position in a range of C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mokfx.passes.terms import (
    CONDITIONS,
    ONE,
    Size,
    Term,
    bound,
    const,
    delta,
    div,
    factors_of,
    integer,
    lin,
    lt,
    minus,
    mod,
    mul,
    perm,
    plus,
    rebuild,
    start,
    substitute,
    var,
)

INDEXED = frozenset(("delta", "lt", "lin", "choose", "running"))
"""Factors that are read under what the other factors ask."""


@dataclass(frozen=True)
class Place:
    """`order^-1[slot] - start(key)`: how many earlier slots have the slot's key."""

    order: Any
    slot: Term
    key: Term


def place_of(term: Term) -> Place | None:
    """The slot whose place among the slots of its key `term` is."""
    if term.op != "lin" or term.args[0] != 0 or len(term.args[1]) != 2:
        return None
    return next((place for place, rest in _places_in(term) if rest.op == "int" and rest.args[0] == 0), None)


def _places_in(term: Term) -> Iterable[tuple[Place, Term]]:
    """Each place that is part of a sum, and what else the sum adds to it."""
    for row, factor in term.args[1]:
        if row.op == "perm" and row.args[1] and factor == 1 and hasattr(row.args[0], "key_at"):
            order, _, slot = row.args
            key = order.key_at(slot)
            rest = lin([(term, 1), (row, -1), (start(order.keys, key), 1)])
            if key.op != "int" and start(order.keys, key) in dict(term.args[1]):
                yield Place(order, slot, key), rest


def is_kept(term: Term) -> Term | None:
    """The id that an indicator asks to be one of an expert: `-1 < id`, or `0 < id + 1`."""
    gap = minus(term.args[1], term.args[0]) if term.op == "lt" else integer(0)
    key, factor = gap.args[1][0] if gap.op == "lin" and len(gap.args[1]) == 1 and gap.args[0] == 1 else (None, 0)
    return key if key is not None and factor == 1 and key.op == "at" and key.args[0].dropped else None


def not_negative(term: Term) -> bool:
    """Whether an index is known to be at least 0; an expert id is by contract, but for the dropped -1."""
    if bound(term) is not None or term.op in ("at", "seg", "count", "start"):
        return True
    if term.op == "lin":
        if any(not_negative(rest) for _, rest in _places_in(term)):
            return True
        constant, parts = term.args
        positive = isinstance(constant, int) and constant >= 0 and all(isinstance(c, int) and c > 0 for _, c in parts)
        return positive and all(not_negative(t) for t, _ in parts)
    return False


def under(flat: list[Term]) -> list[Term]:
    """The factors of a product, each read where the indicators among them are 1."""
    for asked in [f for f in flat if f.op in CONDITIONS]:
        pick, first = _picked(asked), _first(asked)
        flat = [f if f is asked else _given(f, asked, pick) for f in flat]
        if first is not None:
            flat = [f if f is asked else replaced(f, *first) for f in flat]
    return flat


def given(condition: Term, parts: Iterable[Term]) -> Term:
    """A condition where the indicators among the factors of a product are 1."""
    for asked in [f for f in parts if f.op in CONDITIONS]:
        pick = _picked(asked)
        if pick is not None and pick[0] in condition.free:
            condition = substitute(condition, dict((pick,)))
        if asked in asked_in(condition):
            condition = assume(condition, asked)
        first = _first(asked)
        condition = condition if first is None else replaced(condition, *first)
    return condition


def _first(asked: Term) -> tuple[Term, Term] | None:
    """Under `lt(P, 1)` the slot is the first of its key: where its rows start is its row."""
    place = place_of(asked.args[0]) if asked.op == "lt" and asked.args[1] is integer(1) else None
    return None if place is None else (start(place.order.keys, place.key), perm(place.order, True, place.slot))


def _picked(asked: Term) -> tuple[Term, Term] | None:
    """`(v, X)` for an indicator that a variable is an element of data."""
    if asked.op == "delta":
        for variable, value in (asked.args, reversed(asked.args)):
            if variable.op == "var" and value.op in ("at", "seg") and variable not in value.free:
                return variable, value
    return None


def _given(factor: Term, asked: Term, pick: tuple[Term, Term] | None) -> Term:
    if pick is not None and factor.op in INDEXED and not (factor.op == "delta" and pick[0] in factor.args):
        factor = substitute(factor, dict((pick,)))
    return assume(factor, asked) if asked in factor.inner else factor


def assume(term: Term, asked: Term) -> Term:
    """`term` where the indicator `asked` is 1."""
    return replaced(term, asked, ONE, lambda node: asked in asked_in(node))


def replaced(term: Term, old: Term, new: Term, holds: Callable[[Term], bool] = lambda node: True) -> Term:
    """`term` with one term in place of another, looked for where `holds` says."""
    done: dict[Term, Term] = {}

    def visit(node: Term) -> Term:
        if node is old:
            return new
        if node not in done:
            done[node] = rebuild(node, visit) if old.free <= node.free and holds(node) else node
        return done[node]

    return visit(term)


def asked_in(term: Term) -> frozenset[Term]:
    """The indicators in an index term, and those that it is a product with."""
    return term.inner | {f for f in factors_of(term) if f.op in CONDITIONS}


# -- choices between two indices -----------------------------------------------------------------------------


def within(condition: Term, term: Term, read: Callable[[Term], Term]) -> Term:
    """`read(term)` where `condition` holds: under `lt(P, C)` it sees a position in [0, C) in place of P."""
    for asked in factors_of(condition):
        if asked.op == "lt" and asked.args[1].op == "int" and not_negative(asked.args[0]):
            place, limit = asked.args
            position = var(limit.args[0])
            rest = minus(term, place)
            if place.op != "lin" or place_of(place) is None or set(rest.free) & {position}:
                continue
            if any(part in dict(place.args[1]) for part in _parts(rest)):
                continue
            return substitute(read(plus(rest, position)), {position: place})
    return read(term)


def _parts(term: Term) -> list[Term]:
    return [t for t, _ in term.args[1]] if term.op == "lin" else [term]


def split_choice(term: Term, by: Size) -> tuple[Term, Term]:
    """`divmod(choose(condition, a, b), by)`."""
    from mokfx.passes.terms import choose

    condition, a, b = term.args
    high, low = (within(condition, a, lambda t, f=f: f(t, by)) for f in (div, mod))  # type: ignore[misc]
    return choose(condition, high, div(b, by)), choose(condition, low, mod(b, by))


def delta_of_choice(term: Term, other: Term) -> Term | None:
    """`delta(choose(condition, a, b), other)` where `other` is known not to be b."""
    condition, a, b = term.args
    return mul([condition, delta(a, other)]) if differ(b, other) else None


def lt_of_choice(term: Term, limit: Term) -> Term | None:
    """`lt(choose(condition, a, b), limit)` where it is known for b."""
    condition, a, b = term.args
    first, second = within(condition, a, lambda t: lt(t, limit)), lt(b, limit)
    if second is const(0):
        return mul([condition, first])
    return ONE if first is second is ONE else None


def differ(a: Term, b: Term) -> bool:
    """Whether two indices are known to be different."""
    gap = minus(a, b)
    if gap.op == "int":
        size = gap.args[0]
        return size != 0 if isinstance(size, int) else bool(size.is_positive or size.is_negative)
    return any(high.op == "int" and low.op == "var" and lt(low, high) is ONE for low, high in ((a, b), (b, a)))


# -- indicators that exclude each other ----------------------------------------------------------------------


def disjoint(terms: list[Term]) -> bool:
    """Whether at most one of several products of indicators is not zero."""
    return all(_excludes(a, b) for i, a in enumerate(terms) for b in terms[i + 1 :])


def _excludes(a: Term, b: Term) -> bool:
    wanted = [(v, x, y) for v, x in _wanted(a) for w, y in _wanted(b) if v is w]
    if any(_other_choice(x, y) for _, x, y in wanted):
        return True
    keys = {(x, y) for _, x, y in wanted}
    for _, x, y in wanted:
        first, second = place_of(x), place_of(y)
        # Equal keys and equal places in one order are one slot.
        if first is None or second is None or first.order != second.order:
            continue
        if (first.key, second.key) in keys and differ(first.slot, second.slot):
            return True
    return False


def disjoint_over(variable: Term, term: Term) -> bool:
    """Whether at most one value of a variable leaves a product of indicators not zero."""
    wanted = [(v, x) for v, x in _wanted(term) if v is not variable]
    for _, x in wanted:
        choice = x.args[-1] if x.op == "at" and getattr(x.args[0], "distinct", False) else None
        if choice is variable and not any(variable in row.free for row in x.args[2:-1]):
            return True
        place = place_of(x)
        if place is not None and any(key is place.key for _, key in wanted):
            parts = [t for t in _parts(place.slot) if variable in t.free]
            if parts == [variable]:
                return True
    return False


def picks_once(condition: Term) -> bool:
    """Whether at most one of a token's choices meets a condition."""
    return condition.op == "delta" and any(a.op == "at" and a.args[0].distinct for a in condition.args)


def _wanted(term: Term) -> list[tuple[Term, Term]]:
    """`(v, x)` for each factor that asks an element of data x to be the position or number v."""
    pairs = [f.args for f in factors_of(term) if f.op == "delta"]
    return [(v, x) for pair in pairs for v, x in (pair, pair[::-1]) if v.op in ("var", "int")]


def _other_choice(x: Term, y: Term) -> bool:
    """Whether two ids are different choices of one token, which differ by top-k."""
    if x.op != "at" or y.op != "at" or x.args[:2] != y.args[:2] or not getattr(x.args[0], "distinct", False):
        return False
    *row, choice = x.args[2:]
    *other_row, other_choice = y.args[2:]
    return row == other_row and differ(choice, other_choice)
