"""Places in an expert's queue: running counts over columns of choices, and sums that find who has a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from mokfx.passes.bijections import keys_of, sort_of
from mokfx.passes.generalise import generalise
from mokfx.passes.indicators import Place, place_of
from mokfx.passes.terms import (
    Size,
    Substitution,
    Term,
    at,
    at_most,
    count,
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
    product,
    radix,
    running,
    start,
    substitute,
    unflatten,
    valid,
    var,
)


@dataclass(frozen=True)
class Behind:
    """A running count over all columns, and the counts of the earlier columns that are part of it."""

    running: Term
    before: tuple[Term, ...]


def behind(term: Term) -> Behind | None:
    """What a running count down one column of `ids [..., k]` is part of, if k > 1.

    Let `ids` be read choice by choice: all first choices in token order, then all second ones, and so on;
    slot `j * T + t` is choice j of token t. The slots up to and including it that chose e are those of the
    columns before j that chose e, and those of column j up to and including t:

        running[all columns](e, j * T + t) = sum_{i < j} count[column i](e) + running[column j](e, t)

    So counting a column down from what the earlier columns hold gives places in one stable order of all
    slots. For the first column nothing is missing. A column that is counted down from nothing has no
    such form.
    """
    order, key, position = term.args
    body = order.body
    if body.op != "at" or body.args[1] or order.tie is not None or not isinstance(body.args[-1], Term):
        return None
    leaf, away, *tokens, choice = body.args
    choices = getattr(getattr(leaf, "tensor", None), "shape", (1,))[-1]
    column = choice.args[0] if choice.op == "int" else None
    if tuple(tokens) != order.variables or not tokens or not isinstance(choices, int):
        return None
    if not isinstance(column, int) or not 0 <= column < choices or choices < 2:
        return None
    j = var(choices)
    whole = sort_of(at(leaf, away, *tokens, j), [j, *tokens])
    slot = lin([(integer(column), order.size), (position, 1)])
    before = tuple(count(keys_of(at(leaf, away, *tokens, integer(i))), key) for i in range(column))
    return Behind(running(whole, key, slot), before)


@dataclass(frozen=True)
class FlatPlace:
    """`choose(lt(place, limit), key * stride + place, overflow)`: a row of its own for each kept slot."""

    place: Place
    limit: Term
    stride: Size
    overflow: Term

    def written(self, row: Term) -> tuple[Term, Term]:
        """The position, in the sorted order, of the slot that a row gets; and where there is one.

        Rows from the overflow on get any slots, so they are left unspecified.
        """
        order = self.place.order
        expert, queue = div(row, self.stride), mod(row, self.stride)
        known = [lt(queue, count(order.keys, expert)), lt(queue, self.limit), lt(row, self.overflow)]
        return perm(order, False, plus(start(order.keys, expert), queue)), mul(known)


def flat_place(index: Term) -> FlatPlace | None:
    """A slot's row in buckets of `stride` rows each, if the slot is kept, else some row beyond."""
    asked, kept, overflow = index.args
    placed = [f for f in factors_of(asked) if f.op == "lt" and place_of(f.args[0]) is not None]
    condition = placed[0] if len(placed) == 1 else asked
    place = place_of(condition.args[0]) if condition.op == "lt" else None
    if place is None or overflow.op != "int" or condition.args[1].op != "int":
        return None
    if any(f is not condition and f is not lt(integer(-1), place.key) for f in factors_of(asked)):
        return None
    block = minus(kept, condition.args[0])
    key, stride = block.args[1][0] if block.op == "lin" else (block, 1)
    if lin([(key, stride)]) is not block or key is not place.key or not at_most(condition.args[1].args[0], stride):
        return None
    return FlatPlace(place, condition.args[1], stride, overflow)


def find(variable: Term, body: Term) -> Term | None:
    """The sum over all slots of `[key(slot) = e] [place(slot) = c] f(slot)`: f of the c-th slot of expert e.

    There is one such slot if c is less than the count of e, `order[start(e) + c]`, and none else.
    """
    variables, body = _over_slots(variable, body)
    factors = factors_of(body)
    for asked in factors:
        for index, queue in _asks(asked):
            place = place_of(index)
            expert = None if place is None else _expert(place, factors)
            if place is None or expert is None or (expert.free | queue.free) & variables:
                continue
            whole = _whole(place, variables)
            if whole is None:
                continue
            row: Term = perm(place.order, False, plus(start(place.order.keys, expert), queue))
            mapping = dict(zip(whole, unflatten(row, [v.args[1] for v in whole]), strict=True))
            known = [lt(queue, f.args[1]) for f in factors if f.op == "lt" and f.args[0] is index]
            left = [f for f in factors if f is not asked and not _says(f, place, expert, index)]
            return _where(lt(queue, count(place.order.keys, expert)), mul(known), left, mapping)
    return None


def _asks(factor: Term) -> Sequence[tuple[Term, Term]]:
    """`(index, queue)` for an indicator that an index is a place; in a queue one place long it is 0."""
    if factor.op == "lt":
        return [(factor.args[0], integer(0))] if factor.args[1] is integer(1) else []
    return [factor.args, factor.args[::-1]] if factor.op == "delta" else []


def _over_slots(variable: Term, body: Term) -> tuple[frozenset[Term], Term]:
    """All variables that a sum ranges over, those of sums inside included, and its body."""
    from mokfx.passes.sums import open_sum

    variables = {variable}
    while True:
        parts = factors_of(body)
        inner = next((f for f in parts if f.op in ("sum", "add") and _places(f)), None)
        if inner is None:
            return frozenset(variables), body
        if inner.op == "add":
            choice = var(len(inner.args))
            whole = generalise(sorted(inner.args, key=_column), choice)
            if whole is None:
                return frozenset(variables), body
        else:
            choice, whole = open_sum(inner)
        variables.add(choice)
        body = mul([whole, *(f for f in parts if f is not inner)])


def _places(term: Term) -> bool:
    """Whether each summand asks for a place."""
    if term.op in ("delta", "lt"):
        return any(place_of(index) is not None for index, _ in _asks(term))
    terms: Sequence[Term] = term.args if term.op == "add" else term.args[1:] if term.op == "sum" else ()
    return bool(terms) and all(any(map(_places, factors_of(t))) for t in terms)


def _column(term: Term) -> int:
    """The known number that the ids of a summand are read at, last."""
    places = [place_of(index) for f in factors_of(term) for index, _ in _asks(f)]
    keys = [p.key.args[-1] for p in places if p is not None and p.key.op == "at"]
    return keys[0].args[0] if keys and keys[0].op == "int" else 0


def _expert(place: Place, factors: Sequence[Term]) -> Term | None:
    for f in factors:
        if f.op == "delta" and place.key in f.args:
            expert: Term = f.args[1] if f.args[0] is place.key else f.args[0]
            return expert
    return None


def _whole(place: Place, variables: frozenset[Term]) -> list[Term] | None:
    """The variables of a slot, major to minor, if they are the given ones and it takes each slot once."""
    for order in permutations(variables):
        extents = [v.args[1] for v in order]
        if radix(order, extents) is place.slot and product(extents) == place.order.size:
            return list(order)
    return None


def _says(factor: Term, place: Place, expert: Term, index: Term) -> bool:
    """Whether a factor is one of the conditions that the found slot meets, or speaks of its place only."""
    if factor.op == "lt":
        return factor.args[0] is index
    return factor.op == "delta" and set(factor.args) == {place.key, expert}


def _where(condition: Term, known: Term, left: Sequence[Term], mapping: Substitution) -> Term:
    """A row that is found; where none is, the sum is zero, which later stages need not know."""
    filled = [f for f in left if f.op == "nonzero"]
    term = mul([known, *(f for f in left if f not in filled)])
    term = valid(condition, substitute(term, mapping))
    for f in filled:
        term = valid(substitute(f, mapping), term)
    return term
