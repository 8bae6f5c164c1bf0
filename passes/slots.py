"""Slots that a mask drops: ids of -1, and the places of the others among the rows of their expert.

A gate may drop slots by any rule, say all but the C best of each expert. It then hands on a mask `M[t, e]`, the ids
with -1 for a dropped slot, and as a slot's place how many tokens before have its expert in the mask:

    kept[t, j] = M[t, ids[t, j]]           rest[t, j] = ids[t, j] if kept[t, j] else -1
    place[t, j] = sum_{s <= t} M[s, ids[t, j]] - 1

If `M[t, e]` is 0 for an expert that token t did not choose, and the choices of a token differ, `M[t, e]` is how many
choices of t are e in `rest`. So the place of a kept slot is the number of slots before it that have its expert in
`rest`, token by token: its place in the stable order that sorts `rest`. And it is less than C if no column of M has
more than C ones. Then each kept slot has a row `rest * C + place` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mokfx.passes.bijections import sort_of
from mokfx.passes.facts import shape_of
from mokfx.passes.indicators import is_kept
from mokfx.passes.sums import open_sum
from mokfx.passes.terms import (
    Size,
    Substitution,
    Term,
    at,
    at_most,
    bound,
    factors_of,
    integer,
    lin,
    lt,
    match,
    mul,
    perm,
    plus,
    radix,
    start,
    substitute,
)
from mokfx.passes.value import Leaf, Value, bind, leaf_value, position, size_of

if TYPE_CHECKING:
    from mokfx.passes.rules.table import Call


@dataclass(eq=False)
class Marks(Leaf):
    """A tensor of 0 and 1 with at most `most` ones in each column along its first dimension."""

    most: Size = 0


@dataclass(eq=False)
class Running(Leaf):
    """How many rows up to and including this one `counted` marks, in each column."""

    counted: Value | None = None


@dataclass(eq=False)
class Rest(Leaf):
    """Expert ids, where `kept` is 1; else -1. `ids` and `kept` are terms over `axes`.

    The order that sorts them is one that no program has: dropped slots come last, so that an expert's rows start
    where those of the experts before it end. A program's own sort of such ids is not read.
    """

    dropped: ClassVar[bool] = True
    axes: tuple[Term, ...] = ()
    ids: Term | None = None
    kept: Term | None = None

    def condition(self, index: Sequence[Term]) -> Term:
        """`kept` at a position."""
        assert self.kept is not None
        return substitute(self.kept, self.here(index))

    def here(self, index: Sequence[Term]) -> Substitution:
        """What puts a position in place of `axes`."""
        return {v: i for v, i in zip(self.axes, index, strict=True) if v.op == "var"}


def marks(call: Call, dim: int) -> Value | None:
    """`zeros.scatter(0, index, 1)`: as many marks in a column as the index has rows, or fewer."""
    if dim != 0 or call["value"] not in (1, True) or call.is_float or call.value("self").body is not integer(0):
        return None
    shape, whole = shape_of(call["index"]), shape_of(call["self"])
    if len(shape) != 2 or shape[1] != whole[1]:
        return None
    return leaf_value(Marks(call.out, call.tracker.node, made_by=call.name, most=shape[0]), call.shape)


def running_count(call: Call, value: Value, dim: int) -> Value | None:
    """A running count of what a mask marks."""
    if dim != 0 or len(value.axes) != 2 or call.is_float or not any(map(_marks_of, factors_of(value.body))):
        return None
    return leaf_value(Running(call.out, call.tracker.node, made_by=call.name, counted=value), call.shape)


def rest(call: Call, axes: Sequence[Sequence[Term]], kept: Term, ids: Term) -> Value | None:
    """The ids of the slots that are kept, and -1."""
    variables = tuple(v for axis in axes for v in axis)
    if ids.op != "at" or bound(ids) is None or not (kept.free <= set(variables)):
        return None
    if ids.args[-1] not in variables and len(variables) > 1:
        return None
    leaf = Rest(call.out, call.tracker.node, made_by=call.name, bound=bound(ids), distinct=ids.args[0].distinct)
    value = leaf_value(leaf, call.shape)
    leaf.axes = tuple(map(position, value.axes))
    index: Substitution = {}
    for axis, place in zip(axes, leaf.axes, strict=True):
        index |= bind(tuple(axis), place)
    leaf.ids, leaf.kept = substitute(ids, index), substitute(kept, index)
    return value


def smaller(call: Call, axes: Sequence[Sequence[Term]], left: Term, right: Term) -> Value | None:
    """`minimum(ids, E * kept - 1)`: E - 1 or more leaves an id of E experts as it is."""
    for ids, limit in ((left, right), (right, left)):
        if limit.op != "lin" or limit.args[0] != -1 or len(limit.args[1]) != 1:
            continue
        kept, factor = limit.args[1][0]
        experts = bound(ids)
        if experts is not None and _marks_of(kept) and at_most(experts, factor):
            return rest(call, axes, kept, ids)
    return None


def row_of(condition: Term, row: Term) -> tuple[Term, Term] | None:
    """`(condition, row)` with a slot's place written as that of the order that sorts the ids, if that is what it is."""
    key = is_kept(condition)
    if key is None or row.op != "lin":
        return None
    leaf, _, *index = key.args
    stride = dict(row.args[1]).get(key)
    place = _place(leaf, index, lin([(row, 1), (key, -stride)])) if isinstance(stride, int) else None
    if place is None or not at_most(_most(leaf, index), stride):
        return None
    return mul([condition, lt(place, integer(stride))]), plus(lin([(key, stride)]), place)


def _place(leaf: Rest, index: Sequence[Term], given: Term) -> Term | None:
    """A kept slot's place in the stable order of the ids, if `given` is it."""
    kept = leaf.condition(index)
    counted = _read_count(given, kept)
    assert leaf.ids is not None
    ids = substitute(leaf.ids, leaf.here(index))
    if counted is None:
        return None
    running, token, expert = counted
    if expert is not ids or not isinstance(running, Running) or running.counted is None:
        return None
    if token is not index[0] or not _is_mask_of(running.counted, ids, token, kept):
        return None
    order = sort_of(at(leaf, (), *leaf.axes), leaf.axes, name=str(leaf))
    slot = radix(list(index), shape_of(leaf.tensor))
    return lin([(perm(order, True, slot), 1), (start(order.keys, at(leaf, (), *index)), -1)])


def _read_count(given: Term, kept: Term) -> tuple[Leaf, Term, Term] | None:
    """`(running, token, expert)` if a number is `running[token, expert] - 1` where `kept` is 1."""
    conditions = set(_conditions(kept))
    left = [f for f in factors_of(given) if f not in conditions and not _is_one(f)]
    whole = plus(left[0], integer(1)) if len(left) == 1 else integer(0)
    if whole.op != "at" or len(whole.args) != 4 or whole.args[1]:
        return None
    return whole.args[0], whole.args[2], whole.args[3]


def _is_mask_of(mask: Value, ids: Term, token: Term, kept: Term) -> bool:
    """Whether a mask [T, E] marks experts that the token chose, and among those the kept ones."""
    (row,), (column,) = mask.axes if all(len(axis) == 1 for axis in mask.axes) else ((None,), (None,))
    if row is None or column is None or size_of(mask.axes[1]) != bound(ids):
        return False
    parts = list(factors_of(mask.body))
    chosen = next((f for f in parts if _is_choice(f, ids, row, column)), None)
    if chosen is None:
        return False
    parts.remove(chosen)
    here = {row: token, column: ids}
    return {substitute(f, here) for f in parts} == set(_conditions(kept)) and all(map(_marks_of, parts))


def _is_choice(factor: Term, ids: Term, row: Term, column: Term) -> bool:
    """Whether a factor is how often token `row` chose expert `column`: once or never."""
    body = factor
    if factor.op == "sum":
        if not getattr(ids.args[0], "distinct", False):
            return False
        _, body = open_sum(factor)
    if body.op != "delta" or column not in body.args:
        return False
    key = body.args[0] if body.args[1] is column else body.args[1]
    return key.op == "at" and key.args[:2] == ids.args[:2] and key.args[2] is row and len(key.args) == len(ids.args)


def _conditions(kept: Term) -> list[Term]:
    """The factors of a condition that are not always 1."""
    return [f for f in factors_of(kept) if not _is_one(f)]


def _is_one(term: Term) -> bool:
    """`sum_i [ids[t, j] = ids[t, i]]` where the choices of a token differ."""
    if term.op != "sum":
        return False
    variable, body = open_sum(term)
    if body.op != "delta":
        return False
    for mine, other in (body.args, body.args[::-1]):
        if mine.op == other.op == "at" and mine.args[0].distinct and other.args[-1] is variable:
            return match(other, mine, {}) and mine.args[:-1] == other.args[:-1] and bound_of(mine) == variable.args[1]
    return False


def bound_of(term: Term) -> Size | None:
    """How many choices a token has, where `term` reads one of them."""
    return shape_of(term.args[0].tensor)[-1]


def _marks_of(term: Term) -> Marks | None:
    leaf = term.args[0] if term.op == "at" else None
    return leaf if isinstance(leaf, Marks) else None


def _most(leaf: Rest, index: Sequence[Term]) -> Size:
    """How many kept slots an expert has at most."""
    found = [mark.most for f in _conditions(leaf.condition(index)) if (mark := _marks_of(f)) is not None]
    return min((m for m in found if isinstance(m, int)), default=found[0] if found else shape_of(leaf.tensor)[0])
