"""Joining parts: the rows of all experts, or of all senders, put one after another."""

from __future__ import annotations

from collections.abc import Sequence

from mokfx.passes.bijections import Exchange, is_nothing
from mokfx.passes.facts import shape_of
from mokfx.passes.generalise import generalise
from mokfx.passes.rules.table import Call, rule
from mokfx.passes.terms import (
    ZERO,
    Substitution,
    Term,
    add,
    block_start,
    count,
    delta,
    integer,
    lt,
    minus,
    mul,
    perm,
    plus,
    rebuild,
    received_from,
    seg,
    start,
    substitute,
)
from mokfx.passes.value import Axis, Value, align, axis_of, bind, fresh, position


@rule("aten.cat")
def concatenated(call: Call) -> Value | None:
    # An empty vector is nothing beside tensors of any rank: what a cache begins with.
    tensors = [t for t in call["tensors"] if t.dim() == call.out.dim()]
    values = [call.value(t) for t in tensors]
    dim = call.dim("dim", len(values[0].axes))
    if len(values) == 1:
        return values[0]
    lengths = [call.facts.size_term(shape_of(t)[dim]) for t in tensors]
    axis = axis_of(call.shape[dim])
    parts = _on_common_axes(values, dim)
    if parts is None:
        return None
    frame, bodies, rows = parts
    joined = _join(bodies, rows, lengths, position(axis))
    if joined is None:
        return None
    return Value((*frame[:dim], axis, *frame[dim + 1 :]), joined)


def _on_common_axes(values: Sequence[Value], dim: int) -> tuple[tuple[Axis, ...], list[Term], list[Axis]] | None:
    """Each part's element over shared variables, all but the joined dimension's, which each keeps for itself."""
    renewed = [fresh(v) for v in values]
    frame = renewed[0].axes
    bodies: list[Term] = []
    rows: list[Axis] = []
    for value in renewed:
        mapping: Substitution = {}
        for d, axis in enumerate(value.axes):
            if d != dim and axis != frame[d]:
                if len(axis) != len(frame[d]):
                    return None
                mapping |= dict(zip(axis, frame[d], strict=True))
        bodies.append(substitute(value.body, mapping))
        rows.append(value.axes[dim])
    return frame, bodies, rows


def _join(bodies: Sequence[Term], rows: Sequence[Axis], lengths: Sequence[Term], row: Term) -> Term | None:
    """The element at `row` of the joined dimension."""
    exclusive = _exclusive_cumsum(bodies, rows, row)
    if exclusive is not None:
        return exclusive
    offsets, offset = [], integer(0)
    for length in lengths:
        offsets.append(offset)
        offset = plus(offset, length)
    if len(bodies) == 2 and lengths[0].op == "int" and (bodies[1] is ZERO or is_nothing(bodies[1])):
        # Rows followed by empty ones, for slots that have no place to be read from; or counts, and what is left over.
        return mul([lt(row, lengths[0]), substitute(bodies[0], bind(rows[0], row))])
    if not any(rows) and any(body.routed for body in bodies):
        return generalise(bodies, row)  # a row each, as of a rank's experts; what a router joins is data of its own
    shifted: list[Term] = []
    for body, axis, begin in zip(bodies, rows, offsets, strict=True):
        if len(axis) > 1:
            return None
        shifted.append(substitute(body, dict.fromkeys(axis, minus(row, begin))))
    if all(body is shifted[0] for body in shifted):
        return shifted[0]
    segments = [received_from(t) if t.op == "count" else None for t in lengths]
    known = [s for s in segments if s is not None and s[1].op == "int" and s[2].op == "int"]
    if len(known) == len(segments):
        return _regroup([(s[0], s[1].args[0], s[2].args[0]) for s in known], shifted, row)
    return _by_expert(shifted, lengths, row)


def _by_expert(parts: Sequence[Term], lengths: Sequence[Term], row: Term) -> Term | None:
    """Parts 0, 1, ... hold the rows of experts 0, 1, ...: one term of the row's expert."""
    keys = {t.args[0] for t in lengths if t.op == "count"}
    if len(keys) != 1:
        return None
    (owner,) = keys
    if any(t is not count(owner, integer(e)) for e, t in enumerate(lengths)):
        return None
    expert = seg(owner, row)
    whole = generalise(parts, expert)
    if whole is not None:
        return whole
    return add(mul([delta(integer(e), expert), part]) for e, part in enumerate(parts))


def _regroup(segments: Sequence[tuple[Exchange, int, int]], parts: Sequence[Term], row: Term) -> Term | None:
    """Segments (sender, expert) put in another order: by expert after they arrived by sender, or back."""
    exchange = segments[0][0]
    if any(s[0] != exchange for s in segments):
        return None
    pairs = [(s, e) for _, s, e in segments]
    arrived, grouped = exchange.segment_order()
    if pairs in (arrived, grouped):
        to_grouped = pairs == grouped
        here = [_start(exchange, to_grouped, s, e) for s, e in pairs]
        there = [_start(exchange, not to_grouped, s, e) for s, e in pairs]
        return _moved(parts, here, there, row, perm(exchange.by_expert, not to_grouped, row))
    experts = {e for _, e in pairs}
    if len(experts) == 1 and [s for s, _ in pairs] == list(range(exchange.ranks)):
        (expert,) = experts
        first = start(exchange.local_keys, integer(expert))
        here = [minus(_start(exchange, True, s, e), first) for s, e in pairs]
        there = [_start(exchange, False, s, e) for s, e in pairs]
        return _moved(parts, here, there, row, perm(exchange.by_expert, False, plus(first, row)))
    return None


def _start(exchange: Exchange, grouped: bool, source: int, local: int) -> Term:
    return block_start(exchange, grouped, integer(source), integer(local))


def _moved(parts: Sequence[Term], here: Sequence[Term], there: Sequence[Term], row: Term, whole: Term) -> Term | None:
    """The common term of parts that each read row `there + (row - here)` of one tensor."""
    results: set[Term] = set()
    for part, to, origin in zip(parts, here, there, strict=True):
        read = plus(origin, minus(row, to))
        results.add(_replace(part, read, whole))
    (only,) = results if len(results) == 1 else (None,)
    return only


def _replace(term: Term, old: Term, new: Term) -> Term:
    done: dict[Term, Term] = {}

    def visit(node: Term) -> Term:
        if node is old:
            return new
        if not (node.free & old.free):
            return node
        if node not in done:
            done[node] = rebuild(node, visit)
        return done[node]

    return visit(term)


def _exclusive_cumsum(bodies: Sequence[Term], rows: Sequence[Axis], row: Term) -> Term | None:
    """`[0, cumsum(counts)...]`: where each expert's rows start."""
    if len(bodies) != 2 or bodies[0] is not integer(0) or rows[0] or len(rows[1]) != 1:
        return None
    return _starts(bodies[1], rows[1][0], row)


def _starts(inclusive: Term, key: Term, row: Term) -> Term | None:
    if inclusive.op != "lin":
        return None
    for term, _ in inclusive.args[1]:
        if term.op == "count" and term.args[1] is key and inclusive is plus(start(term.args[0], key), term):
            return start(term.args[0], row)
    return None


@rule("aten.stack")
def stacked(call: Call) -> Value | None:
    tensors = call["tensors"]
    values = [call.value(t) for t in tensors]
    dim = call.dim("dim", len(values[0].axes) + 1)
    axes, bodies = align(values)
    axis = axis_of(len(values))
    body = generalise(bodies, position(axis)) if axis else bodies[0]
    if body is None:
        body = add(mul([delta(position(axis), integer(i)), b]) for i, b in enumerate(bodies))
    return Value((*axes[:dim], axis, *axes[dim:]), body)


@rule("aten.constant_pad_nd")
def padded(call: Call) -> Value | None:
    """A zero before an inclusive cumsum: the exclusive one."""
    value = call.value("self")
    if list(call["pad"]) != [1, 0] or call["value"] != 0 or len(value.axes) != 1 or len(value.axes[0]) != 1:
        return None
    axis = axis_of(call.shape[0])
    body = _starts(value.body, value.axes[0][0], position(axis))
    return None if body is None else Value((axis,), body)
