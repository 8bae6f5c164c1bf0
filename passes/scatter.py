"""Writing at computed positions: solve `index(source row) = target row` for the source row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mokfx.passes.facts import Facts
from mokfx.passes.indicators import picks_once
from mokfx.passes.queues import FlatPlace, flat_place
from mokfx.passes.sums import total
from mokfx.passes.terms import (
    CONDITIONS,
    ONE,
    ZERO,
    Size,
    Substitution,
    Term,
    add,
    at_most,
    bound,
    choose,
    const,
    count,
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
    quotient,
    seg,
    start,
    substitute,
    subterms,
    swap,
    terms_of,
    valid,
    var,
)
from mokfx.passes.value import Value, bind, position


@dataclass
class Solution:
    """Where a target row's values come from."""

    mapping: Substitution = field(default_factory=dict)
    residual: list[Term] = field(default_factory=list)
    """Variables over which several source rows share one target row."""
    conditions: list[Term] = field(default_factory=list)
    """Factors that are zero where no source row has this target."""


def solve(facts: Facts, index: Term, target: Term, unknowns: frozenset[Term]) -> Solution | None:
    """The source positions `unknowns` at which `index` equals `target`, or None if that is data."""
    solution = Solution()
    return solution if _solve(facts, index, target, unknowns, solution) else None


def _solve(facts: Facts, index: Term, target: Term, unknowns: frozenset[Term], into: Solution) -> bool:
    if index in unknowns:
        if index in into.mapping:
            return into.mapping[index] is target
        into.mapping[index] = target
        into.conditions.append(_within(facts, target, index.args[1]))
        return True
    if not (index.free & unknowns):
        into.conditions.append(delta(index, target))
        return True
    if index.op == "perm":
        return _solve(facts, index.args[2], perm(index.args[0], not index.args[1], target), unknowns, into)
    if index.op == "swap":
        group, ranks, inner = index.args
        return _solve(facts, inner, swap(group, ranks, target), unknowns, into)
    if index.op in ("div", "mod"):
        inner, by = index.args
        limit = bound(inner)
        size = by if index.op == "div" else None if limit is None else quotient(limit, by)
        if size is None:
            return False
        other = var(size)
        if other.op == "var":
            into.residual.append(other)
        whole = lin([(target, by), (other, 1)]) if index.op == "div" else lin([(other, by), (target, 1)])
        return _solve(facts, inner, whole, unknowns, into)
    if index.op == "lin":
        return _solve_sum(facts, index, target, unknowns, into)
    return False


def _within(facts: Facts, target: Term, size: Size) -> Term:
    limit = bound(target)
    if limit is not None and at_most(limit, size):
        return ONE
    size_term = facts.size_term(size)
    if size_term.op == "count" and size_term.args[1] is integer(0):
        return delta(integer(0), seg(size_term.args[0], target))
    return ONE if size_term.op == "size" else lt(target, size_term)


def _solve_sum(facts: Facts, index: Term, target: Term, unknowns: frozenset[Term], into: Solution) -> bool:
    moving = [(t, c) for t, c in index.args[1] if t.free & unknowns]
    fixed = lin([(t, c) for t, c in index.args[1] if not t.free & unknowns], index.args[0])
    if len(moving) == 1 and moving[0][1] == 1:
        variable = moving[0][0]
        if variable in unknowns and fixed is not integer(0):
            key = segment_key(facts, fixed, variable.args[1])
            if key is None:
                return False
            into.conditions.append(delta(key[1], seg(key[0], target)))
            into.mapping[variable] = minus(target, fixed)
            return True
        return fixed is integer(0) and _solve(facts, variable, target, unknowns, into)
    if fixed is not integer(0):
        return False
    return _solve_digits(facts, moving, target, unknowns, into)


def _solve_digits(
    facts: Facts, parts: list[tuple[Term, Size]], target: Term, unknowns: frozenset[Term], into: Solution
) -> bool:
    """`target` written in mixed radix: `parts` must be its digits."""
    ones = [t for t, c in parts if c == 1]
    if len(ones) != 1:
        return False
    low = ones[0]
    size = bound(low)
    higher: list[tuple[Term, Size]] = []
    for term, factor in parts:
        if term is low:
            continue
        share = None if size is None else quotient(factor, size)
        if share is None:
            return False
        higher.append((term, share))
    assert size is not None
    if not _solve(facts, low, mod(target, size), unknowns, into):
        return False
    rest = lin(higher)
    return _solve(facts, rest, div(target, size), unknowns, into)


def segment_key(facts: Facts, begin: Term, size: Size) -> tuple[object, Term] | None:
    """`(keys, key)` if rows `[begin, begin + size)` of the rows sorted by `keys` are those of `key`."""
    extent = facts.size_term(size)
    if extent.op != "count" or extent.args[1].op != "int":
        return None
    keys, key = extent.args
    return (keys, key) if start(keys, key) is begin else None


def scatter(
    facts: Facts,
    base: Value,
    indices: dict[int, Term],
    source: Value,
    dims: dict[int, int],
    accumulate: bool,
    once: bool = False,
) -> Value | None:
    """`base` after `base[..., indices[d], ...] = source` (or `+=`).

    `indices[d]` is the index of base dimension d, over the source's variables; `dims[d]` is the source dimension
    that goes along base dimension d unchanged. `once` asks that no two source rows share a target.
    """
    unknowns = frozenset(v for axis in source.axes for v in axis)
    axes = tuple(tuple(var(v.args[1]) for v in axis) for axis in base.axes)
    solution = Solution()
    placed: tuple[int, ...] = ()
    filled: Term | None = None
    bucket = None if accumulate else _bucket(indices)
    if bucket is not None:
        keys, key, place = bucket
        row, expert, queue = plus(indices[place], start(keys, indices[key])), position(axes[key]), position(axes[place])
        if not _solve(facts, row, plus(start(keys, expert), queue), unknowns, solution):
            return None
        solution.conditions.clear()
        placed, filled = (key, place), lt(queue, count(keys, expert))
    cut = None if accumulate or bucket is not None else _cut_place(indices)
    if cut is not None:
        d, flat = cut
        if any(f.op in CONDITIONS for f in factors_of(_bare(source.body))):
            return None  # rows beyond may hold what these rows leave out
        target, filled = flat.written(position(axes[d]))
        if not _solve(facts, flat.place.slot, target, unknowns, solution):
            return None
        solution.conditions.clear()
        placed = (d,)
    for d, axis in enumerate(axes):
        if d in placed:
            continue
        target = position(axis)
        index = indices[d] if d in indices else source.position(dims[d])
        if not _solve(facts, index, target, unknowns, solution):
            return None
    for variable in unknowns - solution.mapping.keys():
        if not accumulate:
            return None
        solution.residual.append(_all_rows(variable, source.body, solution))
    if once and solution.residual and not any(picks_once(c) for c in solution.conditions):
        return None
    body = mul([substitute(source.body, solution.mapping), *solution.conditions])
    if cut is not None and filled is not None and base.body.op == "int" and not solution.residual:
        return Value(axes, choose(filled, substitute(source.body, solution.mapping), base.body))
    if filled is not None:
        if base.body not in (ZERO, integer(0)) or solution.residual:
            return None
        return Value(axes, valid(filled, body))
    renamed = {old: new for a, b in zip(base.axes, axes, strict=True) for old, new in zip(a, b, strict=True)}
    before = substitute(base.body, renamed)
    if accumulate:
        for variable in solution.residual:
            body = total(variable, body)
        return Value(axes, add([before, body]))
    if solution.residual:
        return None
    return Value(axes, overwrite(before, mul(solution.conditions), substitute(source.body, solution.mapping)))


def _bucket(indices: dict[int, Term]) -> tuple[Any, int, int] | None:
    """`(keys, d, c)` if dimension d is indexed by a row's expert and c by its place among the expert's rows."""
    for d, key in indices.items():
        for c, place in indices.items():
            if c == d or place.op != "lin":
                continue
            for keys in [t.args[0] for t, factor in place.args[1] if t.op == "start" and factor == -1]:
                if seg(keys, plus(place, start(keys, key))) is key:
                    return keys, d, c
    return None


def _bare(term: Term) -> Term:
    return term.args[1] if term.op == "valid" else term


def _cut_place(indices: dict[int, Term]) -> tuple[int, FlatPlace] | None:
    """The dimension that is indexed by `expert * C + place`, dropped rows beyond the experts."""
    found = [(d, flat_place(index)) for d, index in indices.items() if index.op == "choose"]
    return next(((d, flat) for d, flat in found if flat is not None), None)


def _all_rows(variable: Term, body: Term, into: Solution) -> Term:
    """A variable that no index mentions: all its rows meet in one target, counted in the order before sorting."""
    other = var(variable.args[1])
    for bijection in body.perms:
        if perm(bijection, False, variable) in subterms(body) and bijection.limit(False) == variable.args[1]:
            into.mapping[variable] = perm(bijection, True, other)
            return other
    into.mapping[variable] = other
    return other


def overwrite(before: Term, condition: Term, after: Term) -> Term:
    """`after` where `condition` is one, `before` elsewhere."""
    if condition is ONE:
        return after
    written = mul([condition, after])
    if before in (ZERO, integer(0)):
        return written
    if all(_excludes(term, condition) for term in terms_of(before)):
        return add([before, written])
    return add([mul([before, add([ONE, mul([const(-1), condition])])]), written])


def _excludes(term: Term, condition: Term) -> bool:
    """Whether `term` is zero where the indicator `condition` is one, since both ask for different keys."""
    if condition.op != "delta":
        return False
    factors = term.args if term.op == "mul" else (term,)
    return any(
        f.op == "delta"
        and len(set(f.args) & set(condition.args)) == 1
        and all(a.op == "int" for a in set(f.args) ^ set(condition.args))
        for f in factors
    )


def write_segment(facts: Facts, base: Value, dim: int, begin: Term, written: Value) -> Value | None:
    """`base` after rows `[begin, begin + size)` along `dim` were overwritten through a view."""
    where = base.position(dim)
    mapping: Substitution = {}
    for d, (old, new) in enumerate(zip(written.axes, base.axes, strict=True)):
        if d != dim:
            mapping.update(bind(old, position(new)))
    axis = written.axes[dim]
    if not axis:
        condition = delta(where, begin)
    else:
        size = axis[0].args[1] if len(axis) == 1 else None
        if size is None:
            return None
        key = segment_key(facts, begin, size)
        if key is not None:
            condition = delta(key[1], seg(key[0], where))
        elif begin.op == "int" and isinstance(size, int):
            below = lt(where, begin) if begin is not integer(0) else ZERO
            condition = mul([lt(where, integer(begin.args[0] + size)), add([ONE, mul([const(-1), below])])])
        else:
            return None
        mapping[axis[0]] = minus(where, begin)
    return base.with_body(overwrite(base.body, condition, substitute(written.body, mapping)))
