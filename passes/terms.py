"""What one element of a tensor is, as a term over the positions of its dimensions.

A fact about a tensor (see `value.py`) is a list of axes, each ranging over variables, and a *term*: the element at
those positions. The vocabulary is small:

    index terms   variables, integers, `lin` (sum of coefficient * term), `div`, `mod`,
                  `perm` (a named bijection or its inverse), `swap` (a rank seen from the other side of an exchange),
                  `seg` (the r-th smallest expert id), `count` and `start` (rows of one expert / of all earlier ones),
                  `choose` (one index where a condition holds, another elsewhere),
                  `delta` (1 where two indices are equal), `lt`, `nonzero` (1 where a number is not 0)
    data terms    `at` (an element of a tensor that the graph computes), `add`, `mul`, `sum` over a bound variable,
                  `const`, `cast`, `valid` (unspecified where a condition fails) and named pointwise functions

Indexing a tensor is substitution, and a match is decided by where the substitutions end: a layer is an MoE layer if
each index has cancelled down to "this token, its j-th choice". Terms are interned, so equal terms are one object.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from typing import Any, TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr
Substitution: TypeAlias = dict["Term", "Term"]


class Term:
    """One node of a term. `op` names it; `args` holds terms and hashable attributes."""

    __slots__ = ("__weakref__", "args", "depth", "free", "inner", "looked_up", "op", "perms", "routed", "uid")

    op: str
    args: tuple[Any, ...]
    free: frozenset[Term]
    depth: int
    """How many nested `sum`s it holds: names the next bound variable."""
    inner: frozenset[Term]
    """The indicators that its indices are made with."""
    perms: frozenset[Any]
    """The bijections that occur in it."""
    routed: bool
    """Whether it depends on where routing put a row."""
    looked_up: bool
    """Whether it reads a tensor at a position that is itself data."""
    uid: int

    def __repr__(self) -> str:
        return render(self)

    def __lt__(self, other: Term) -> bool:
        return self.uid < other.uid


_interned: weakref.WeakValueDictionary[tuple[str, tuple[Any, ...]], Term] = weakref.WeakValueDictionary()
_uids = itertools.count()


def make(op: str, *args: Any) -> Term:
    """The term `op(args)`, one object for equal arguments. Use the constructors below: they simplify."""
    key = (op, args)
    term = _interned.get(key)
    if term is None:
        term = Term()
        term.op, term.args, term.uid = op, args, next(_uids)
        children = list(_children(args))
        bound = frozenset((args[0],)) if op == "sum" else frozenset()
        own = frozenset((term,)) if op == "var" else frozenset()
        term.free = frozenset().union(own, *(child.free for child in children)) - bound
        term.depth = max((child.depth for child in children), default=0) + (op == "sum")
        term.inner = frozenset().union(*(child.inner for child in children))
        if op in ("delta", "lt", "lin", "choose"):
            term.inner |= {f for child in children for f in factors_of(child) if f.op in ("delta", "lt", "nonzero")}
        term.perms = frozenset().union(*(child.perms for child in children))
        if op == "perm":
            term.perms |= {args[0]}
        data_index = op == "at" and any(_reads_data(child) for child in children)
        term.looked_up = data_index or any(child.looked_up for child in children)
        term.routed = op in ROUTED or bool(op == "at" and args[1]) or any(child.routed for child in children)
        _interned[key] = term
    return term


ROUTED = frozenset(
    "perm swap seg count start delta lt nonzero choose valid running sender block_start".split()
)


def _reads_data(index: Term) -> bool:
    return index.op == "at" or any(_reads_data(child) for child in _children(index.args))


def children_of(term: Term) -> list[Term]:
    return list(_children(term.args))


def _children(args: Iterable[Any]) -> Iterable[Term]:
    for arg in args:
        if isinstance(arg, Term):
            yield arg
        elif isinstance(arg, tuple):
            yield from _children(arg)


# -- sizes ---------------------------------------------------------------------------------------------------------


def as_size(value: Any) -> Size:
    """A dimension's size as an int or, if it is symbolic, its sympy expression."""
    node = getattr(value, "node", None)
    expr = node.shape_env.replace(node.expr) if node is not None and node.shape_env is not None else value
    return int(expr) if isinstance(expr, int | sympy.Integer) else expr


def product(sizes: Iterable[Size]) -> Size:
    return _plain(reduce(lambda a, b: a * b, sizes, 1))


def _plain(size: Any) -> Size:
    return int(size) if isinstance(size, int | sympy.Integer) else size


def quotient(size: Size, by: Size) -> Size | None:
    """`size / by` if it is known to be a whole number."""
    if by == 0:
        return None
    if isinstance(size, int) and isinstance(by, int):
        return size // by if size % by == 0 else None
    ratio = sympy.cancel(sympy.sympify(size) / by)
    whole = ratio.is_integer and not any(isinstance(a, sympy.Pow) and a.exp.is_negative for a in ratio.atoms(sympy.Pow))
    return _plain(ratio) if whole else None


def at_most(size: Size, limit: Size) -> bool:
    """Whether `size <= limit` is known without asking the shape environment to guard on it."""
    gap = _plain(sympy.expand(limit - size)) if not isinstance(limit - size, int) else limit - size
    return gap >= 0 if isinstance(gap, int) else bool(gap.is_nonnegative)


# -- index terms ---------------------------------------------------------------------------------------------------


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
    _gather_sources(total)
    _gather_digits(total)
    _gather_columns(total)
    live = tuple(sorted(((t, c) for t, c in total.items() if c != 0), key=lambda pair: pair[0].uid))
    constant = _plain(constant)
    if not live:
        return integer(constant)
    if len(live) == 1 and live[0][1] == 1 and constant == 0:
        return live[0][0]
    return fold_regrouped(fold_local(fold_sorted(make("lin", constant, live))))


def _gather_sources(total: dict[Term, Size]) -> None:
    """Counts that all ranks send to one local expert become one count of the rows received for it."""
    by_expert: dict[tuple[Any, Term], dict[int, Term]] = {}
    for term in total:
        if term.op == "count" and isinstance(term.args[1], Term):
            received = received_from(term)
            if received is not None and received[1].op == "int":
                exchange, source, local = received
                by_expert.setdefault((exchange, local), {})[source.args[0]] = term
    for (exchange, local), terms in by_expert.items():
        if len(terms) == exchange.ranks and len({total[t] for t in terms.values()}) == 1:
            factor = total[next(iter(terms.values()))]
            for term in terms.values():
                del total[term]
            whole = count(exchange.local_keys, local)
            total[whole] = _plain(total.get(whole, 0) + factor)


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


def _gather_columns(total: dict[Term, Size]) -> None:
    """A running count of second choices, and how many first choices there are, is a running count of both."""
    for term in [t for t in total if t.op == "running"]:
        from mokfx.passes.queues import behind

        whole = behind(term)
        if whole is not None and all(total.get(first) == total[term] for first in whole.before):
            factor = total.pop(term)
            for first in whole.before:
                del total[first]
            total[whole.running] = _plain(total.get(whole.running, 0) + factor)


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
    return halves if term.op == "perm" else (fold_sorted(halves[0]), fold_sorted(halves[1]))


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


def seg(keys: Any, position: Term) -> Term:
    """The `position`-th smallest of `keys`: the same for every way of sorting them."""
    if position.op == "perm":
        bijection, inverse, inner = position.args
        if inverse and getattr(bijection, "keys", None) == keys:
            key: Term = bijection.key_at(inner)
            return key
    return make("seg", keys, position)


def fold_sorted(term: Term) -> Term:
    """A key read through the order that sorts it is the sorted sequence, whatever the order's ties."""
    for bijection in term.perms:
        if hasattr(bijection, "position_of") and bijection.body.op == term.op:
            position = bijection.position_of(term)
            if position is not None and position.op == "perm" and position.args[:2] == (bijection, False):
                return seg(bijection.keys, position.args[2])
    return term


def match(pattern: Any, term: Any, found: Substitution) -> bool:
    """Whether `term` is `pattern` with its variables replaced; `found` gets the replacements."""
    if isinstance(pattern, Term):
        if pattern.op == "var":
            return found.setdefault(pattern, term) is term
        if not pattern.free:
            return pattern is term
        return isinstance(term, Term) and pattern.op == term.op and match(pattern.args, term.args, found)
    if isinstance(pattern, tuple) and isinstance(term, tuple) and len(pattern) == len(term):
        return all(match(p, t, found) for p, t in zip(pattern, term, strict=True))
    return bool(pattern == term)


def fold_local(term: Term) -> Term:
    """A received row's expert less this rank's first expert is its local expert."""
    if term.op == "lin" and len(term.args[1]) == 1 and term.args[1][0][1] == 1:
        inner = term.args[1][0][0]
        if inner.op == "seg" and inner.args[1].op == "perm":
            exchange, inverse, _ = inner.args[1].args
            if not inverse and getattr(exchange, "keys_sent", None) == inner.args[0]:
                first = exchange.first_expert
                if first is not None and term.args[0] == -first:
                    return mod(inner, exchange.local_experts)
    return term


def fold_regrouped(term: Term) -> Term:
    """A row's place in its segment, counted from where the segment starts in the other order, is its row there."""
    if term.op != "lin" or term.args[0] != 0 or len(term.args[1]) != 3:
        return term
    starts = {c: t for t, c in term.args[1] if t.op == "block_start"}
    rows = [t for t, c in term.args[1] if t.op != "block_start" and c == 1]
    if set(starts) != {1, -1} or len(rows) != 1:
        return term
    to, origin, row = starts[1], starts[-1], rows[0]
    exchange, grouped, source, local = origin.args
    if to.args != (exchange, not grouped, source, local):
        return term
    arrived = perm(exchange.by_expert, False, row) if grouped else row
    if exchange.segment_of(arrived) != (source, local):
        return term
    return perm(exchange.by_expert, not grouped, row)


def block_start(exchange: Any, grouped: bool, source: Term, local: Term) -> Term:
    """The first received row of segment (source rank, local expert): as rows arrive, or grouped by expert."""
    if source.op == local.op == "int":
        segments = exchange.segment_order()[grouped]
        before = segments[: segments.index((source.args[0], local.args[0]))]
        return lin((exchange.count_from(integer(s), integer(e)), 1) for s, e in before)
    return make("block_start", exchange, grouped, source, local)


def sender(exchange: Any, row: Term) -> Term:
    """The rank that a received row came from."""
    return make("sender", exchange, row)


def peer(group: str, ranks: int, local_experts: int, source: Term, term: Term) -> Term:
    """What `term`, a count of rows, is on rank `source`; for an expert of this rank it is a count of rows sent here."""
    from mokfx.passes.bijections import group_rank

    rank = group_rank(group)
    if rank is not None and term.op == "count":
        own = lin([(term.args[1], 1)], -rank * local_experts)
        limit = bound(own)
        if limit is not None and at_most(limit, local_experts):
            return count(term.args[0], lin([(swap(group, ranks, source), local_experts), (own, 1)]))
    return make("peer", group, ranks, local_experts, source, term)


def count(keys: Any, key: Term) -> Term:
    """How many of `keys` equal `key`."""
    return make("count", keys, key)


def start(keys: Any, key: Term) -> Term:
    """How many of `keys` are smaller than `key`; for a known key the sum of the counts before it."""
    if key.op == "int" and isinstance(key.args[0], int):
        return lin((count(keys, integer(e)), 1) for e in range(key.args[0]))
    if key.op == "lin" and isinstance(key.args[0], int) and key.args[0] > 0:
        before = lin([(key, 1)], -1)
        return plus(start(keys, before), count(keys, before))
    return make("start", keys, key)


def running(order: Any, key: Term, position: Term) -> Term:
    """How many keys equal `key` at positions up to and including `position`, in the order before a stable sort."""
    from mokfx.passes.queues import behind

    if order.key_at(position) is key:
        return lin([(perm(order, True, position), 1), (start(order.keys, key), -1)], 1)
    term = make("running", order, key, position)
    whole = behind(term)
    return term if whole is None or whole.before else whole.running


def choose(condition: Term, a: Term, b: Term) -> Term:
    """Index `a` where an indicator is 1, `b` where it is 0."""
    if a is b or condition.op == "const":
        return b if condition is const(0) else a
    return make("choose", condition, a, b)


def nonzero(number: Term) -> Term:
    """1.0 where a number is not 0, else 0.0."""
    return make("nonzero", number)


def received_from(term: Term) -> tuple[Any, Term, Term] | None:
    """`(exchange, source rank, local expert)` if `term` counts what one rank sends to an expert of this rank."""
    from mokfx.passes.bijections import Exchange

    key = term.args[1]
    parts = dict(key.args[1]) if key.op == "lin" else {key: 1}
    swaps = [t for t in parts if t.op == "swap"]
    if len(swaps) != 1:
        return None
    group, ranks, source = swaps[0].args
    local_experts = parts.pop(swaps[0])
    local = lin(parts.items(), key.args[0] if key.op == "lin" else 0)
    limit = bound(local)
    if not isinstance(local_experts, int) or limit is None or not at_most(limit, local_experts):
        return None
    return Exchange(group, ranks, local_experts, term.args[0]), source, local


# -- data terms ----------------------------------------------------------------------------------------------------

ZERO: Term
ONE: Term


def const(value: float) -> Term:
    return make("const", float(value))


def at(leaf: Any, away: tuple[Any, ...], *index: Term) -> Term:
    """Element `index` of the tensor `leaf`, on this rank or across the exchanges `away`."""
    return fold_sorted(make("at", leaf, away, *index))


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
    if b.op == "count" and (_place_in_segment(a, *b.args) or (a is integer(0) and match(b.args[0].body, b.args[1], {}))):
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
    condition = mul(given(c, parts) for c in conditions if c.op != "nonzero" or c.args[0] not in parts)
    return term if condition is const(1) else make("valid", condition, term)


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
    indicators = {f for f in flat if f.op in ("delta", "lt", "nonzero")}
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


def factors_of(term: Term) -> tuple[Term, ...]:
    return term.args if term.op == "mul" else (term,)


def terms_of(term: Term) -> tuple[Term, ...]:
    return term.args if term.op == "add" else (term,)


def apply(name: str, *args: Any) -> Term:
    """A named pointwise function; it passes through `valid`."""
    conditions = [a.args[0] for a in args if isinstance(a, Term) and a.op == "valid"]
    bare = tuple(a.args[1] if isinstance(a, Term) and a.op == "valid" else a for a in args)
    return reduce(lambda term, condition: valid(condition, term), conditions, make(name, *bare))


ZERO, ONE = const(0), const(1)


# -- rewriting -----------------------------------------------------------------------------------------------------


def substitute(term: Term, mapping: Substitution) -> Term:
    """`term` with variables replaced, rebuilt by the simplifying constructors."""
    mapping = {v: t for v, t in mapping.items() if v is not t and v.op == "var"}
    if not mapping:
        return term
    targets = frozenset(mapping)
    done: dict[Term, Term] = {}

    def visit(node: Term) -> Term:
        if not (node.free & targets):
            return node
        if node not in done:
            done[node] = mapping[node] if node in mapping else rebuild(node, visit)
        return done[node]

    return visit(term)


def rebuild(term: Term, visit: Callable[[Term], Term]) -> Term:
    """`term` with `visit` applied to each child, through the constructor of its op."""
    op, args = term.op, term.args
    if op in ("var", "int", "const"):
        return term
    if op == "lin":
        return lin([(visit(t), c) for t, c in args[1]], args[0])
    if op in ("div", "mod"):
        return (div if op == "div" else mod)(visit(args[0]), args[1])
    if op == "perm":
        return perm(args[0], args[1], visit(args[2]))
    if op == "swap":
        return swap(args[0], args[1], visit(args[2]))
    if op == "sender":
        return sender(args[0], visit(args[1]))
    if op == "peer":
        return peer(*args[:3], visit(args[3]), visit(args[4]))
    if op == "block_start":
        return block_start(args[0], args[1], visit(args[2]), visit(args[3]))
    if op == "running":
        return running(args[0], visit(args[1]), visit(args[2]))
    if op in ("seg", "count", "start"):
        return {"seg": seg, "count": count, "start": start}[op](args[0], visit(args[1]))
    if op == "at":
        return at(args[0], visit_marks(args[1], visit), *(visit(a) for a in args[2:]))
    if op == "choose":
        return choose(*(visit(a) for a in args))
    if op == "nonzero":
        return nonzero(visit(args[0]))
    if op in ("delta", "lt", "valid"):
        return {"delta": delta, "lt": lt, "valid": valid}[op](visit(args[0]), visit(args[1]))
    if op in ("mul", "add"):
        return (mul if op == "mul" else add)(visit(a) for a in args)
    if op == "sum":
        from mokfx.passes.sums import total

        return total(args[0], visit(args[1]))
    return apply(op, *(visit(a) if isinstance(a, Term) else a for a in args))


def visit_marks(marks: tuple[Any, ...], visit: Callable[[Term], Term]) -> tuple[Any, ...]:
    """The marks of an element, with `visit` applied to the ranks that they name."""
    return tuple(tuple(visit(a) if isinstance(a, Term) else a for a in m) if isinstance(m, tuple) else m for m in marks)


def render(term: Term) -> str:
    """A term for people: used in debugging and in the reasons of misses."""
    op, args = term.op, term.args
    if op == "var":
        return f"v{args[0]}" if isinstance(args[0], int) else "".join(map(str, args[0]))
    if op in ("int", "const"):
        return f"{args[0]:g}" if isinstance(args[0], float) else str(args[0])
    if op == "lin":
        text = " + ".join(f"{t}" if c == 1 else f"{c}*{t}" for t, c in args[1])
        return f"({text} + {args[0]})" if args[0] != 0 else f"({text})"
    if op == "perm":
        return f"{args[0]}{'^-1' if args[1] else ''}[{args[2]}]"
    if op == "at":
        return f"{args[0]}{'@' * len(args[1])}[{', '.join(map(str, args[2:]))}]"
    if op == "sum":
        return f"sum_{args[0]}({args[1]})"
    if op in ("mul", "add"):
        return "(" + (" * " if op == "mul" else " + ").join(map(str, args)) + ")"
    return f"{op}({', '.join(map(str, args))})"
