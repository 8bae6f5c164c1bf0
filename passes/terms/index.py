"""Index arithmetic: sums with coefficients, digits of positions, bijections that meet their inverse.

What is known of rows sorted by expert (`rows.py`) joins in as lemmas: `on_parts` sees the parts of a sum while it is
put together, `on_index` a finished term.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import sympy

from mokfx.passes.terms.sizes import Size, _plain, at_most, quotient
from mokfx.passes.terms.term import Term, _uids, make

on_parts: list[Callable[[dict[Term, Size]], None]] = []
on_index: list[Callable[[Term], Term]] = []


def settled(term: Term) -> Term:
    """A finished index term, once every lemma has had its say."""
    for lemma in on_index:
        term = lemma(term)
    return term


def var(size: Size, name: Hashable = None) -> Term:
    """A fresh position in `[0, size)`; a range of one position is the integer 0."""
    if size == 1:
        return integer(0)
    return make("var", next(_uids) if name is None else name, size)


def integer(value: Size) -> Term:
    return make("int", _plain(value))


def lin(parts: Iterable[tuple[Term, Size]], constant: Size = 0) -> Term:
    """`constant + sum(coefficient * term)`, flattened and in one order."""
    total: dict[Term, Size] = {}
    todo = list(parts)
    while todo:
        term, factor = todo.pop()
        if term.op == "int":
            constant = constant + factor * term.args[0]
        elif term.op == "const":
            constant = constant + factor * int(term.args[0])
        elif term.op == "lin":
            constant = constant + factor * term.args[0]
            todo.extend((inner, factor * coefficient) for inner, coefficient in term.args[1])
        else:
            total[term] = _plain(total.get(term, 0) + factor)
    for lemma in on_parts:
        lemma(total)
    _gather_digits(total)
    live = tuple(sorted(((t, c) for t, c in total.items() if c != 0), key=lambda pair: pair[0].uid))
    constant = _plain(constant)
    if not live:
        return integer(constant)
    if len(live) == 1 and live[0][1] == 1 and constant == 0:
        return live[0][0]
    return settled(make("lin", constant, live))


def _gather_digits(total: dict[Term, Size]) -> None:
    """`by * (X // by) + X % by` is X."""
    for high in [t for t in total if t.op == "div"]:
        inner, by = high.args
        low = make("mod", inner, by)
        if low in total and total.get(high) == _plain(total[low] * by):
            factor = total.pop(low)
            del total[high]
            parts = inner.args[1] if inner.op == "lin" else ((inner, 1),)
            if inner.op == "lin" and inner.args[0] != 0:
                total[high], total[low] = _plain(factor * by), factor
                continue
            for part, coefficient in parts:
                total[part] = _plain(total.get(part, 0) + factor * coefficient)


def plus(a: Term, b: Term) -> Term:
    return lin([(a, 1), (b, 1)])


def minus(a: Term, b: Term) -> Term:
    return lin([(a, 1), (b, -1)])


def bound(term: Term) -> Size | None:
    """An exclusive upper bound of a non-negative index term, or None if none is known."""
    op, args = term.op, term.args
    if op == "int":
        return args[0] + 1 if isinstance(args[0], int) and args[0] >= 0 else None
    if op == "var":
        return args[1]
    if op == "perm":
        return args[0].limit(args[1])
    if op == "swap":
        return args[1]
    if op == "sender":
        return args[0].ranks
    if op == "mod":
        return args[1]
    if op == "div":
        inner = bound(args[0])
        return None if inner is None else quotient(inner, args[1])
    if op == "at":
        return args[0].bound
    if op == "seg":
        return bound(args[0].body)
    if op == "lin":
        total: Size = args[0] + 1
        if isinstance(args[0], int) and args[0] < 0:
            return None
        for inner_term, factor in args[1]:
            inner = bound(inner_term)
            if inner is None or (isinstance(factor, int) and factor < 0):
                return None
            total = total + factor * (inner - 1)
        return _plain(total if isinstance(total, int) else sympy.expand(total))
    return None


def div(term: Term, by: Size) -> Term:
    """`term // by` for a non-negative term."""
    return _split(term, by)[0]


def mod(term: Term, by: Size) -> Term:
    """`term % by` for a non-negative term."""
    return _split(term, by)[1]


def _split(term: Term, by: Size) -> tuple[Term, Term]:
    if by == 1:
        return term, integer(0)
    if term.op == "mod" and term.args[1] == by:
        return integer(0), term
    limit = bound(term)
    if limit is not None and at_most(limit, by):
        return integer(0), term
    if term.op == "choose":
        from mokfx.passes.indicators import split_choice

        return split_choice(term, by)
    parts, constant = ([(term, 1)], 0) if term.op != "lin" else (list(term.args[1]), term.args[0])
    if term.op == "int":
        parts, constant = [], term.args[0]
    whole: list[tuple[Term, Size]] = []
    rest: list[tuple[Term, Size]] = []
    for part, factor in parts:
        share = quotient(factor, by)
        if share is None:
            rest.append((part, factor))
        else:
            whole.append((part, share))
    carried = constant // by if isinstance(constant, int) and isinstance(by, int) else quotient(constant, by)
    carried = 0 if carried is None else carried
    if whole or carried != 0:
        remainder = lin(rest, constant - carried * by)
        limit = bound(remainder)
        if limit is not None and at_most(limit, by):
            return lin(whole, carried), remainder
        if limit is not None:
            high, low = _split(remainder, by)
            return lin([*whole, (high, 1)], carried), low
    halves = make("div", term, by), make("mod", term, by)
    # A plain digit of a position is no key; a digit of anything else may be one.
    return halves if term.op == "perm" else (settled(halves[0]), settled(halves[1]))


def radix(variables: Iterable[Term], sizes: Iterable[Size]) -> Term:
    """The position of `variables` in their flattened (row-major) range."""
    parts: list[tuple[Term, Size]] = []
    stride: Size = 1
    for variable, size in reversed(list(zip(variables, sizes, strict=True))):
        parts.append((variable, stride))
        stride = stride * size
    return lin(parts)


def unflatten(position: Term, sizes: Iterable[Size]) -> list[Term]:
    """The inverse of `radix`: one term for each of `sizes`."""
    terms: list[Term] = []
    for size in reversed(list(sizes)[1:]):
        position, last = _split(position, size)
        terms.append(last)
    return [position, *reversed(terms)]


def perm(bijection: Any, inverse: bool, position: Term) -> Term:
    """`bijection(position)`, or its inverse; a bijection meets its inverse and both are gone."""
    if position.op == "perm" and position.args[0] == bijection and position.args[1] != inverse:
        inner: Term = position.args[2]
        return inner
    return make("perm", bijection, inverse, position)


def swap(group: str, ranks: int, position: Term) -> Term:
    """Rank `position` seen from the other side of an equal all-to-all of `group`; twice is once back."""
    if position.op == "swap" and position.args[:2] == (group, ranks):
        inner: Term = position.args[2]
        return inner
    return make("swap", group, ranks, position)
