"""Sorting by expert, counting rows, offsets: where the order of a layer's rows comes from."""

from __future__ import annotations

from collections.abc import Sequence

from mokfx.passes.bijections import all_of, has_dropped, keys_of, sort_of
from mokfx.passes.facts import shape_of
from mokfx.passes.rules.table import Call, rule
from mokfx.passes.slots import running_count
from mokfx.passes.sums import open_sum, total
from mokfx.passes.terms import (
    Term,
    block_start,
    bound,
    count,
    integer,
    lt,
    perm,
    plus,
    radix,
    received_from,
    running,
    seg,
    start,
    substitute,
)
from mokfx.passes.value import Leaf, Value, axis_of, leaf_value, position, size_of


@rule("aten.sort", "aten.argsort")
def sort(call: Call) -> Sequence[Value | None] | None:
    value = call.value("self")
    if call["self"].is_floating_point():
        # As with top-k, what is chosen is data.
        return _selection(call, *call.out) if isinstance(call.out, list | tuple) else [_chosen(call, call.out)]
    if len(value.axes) != 1 or call["descending"] or not isinstance(call.out, list | tuple):
        return None
    if value.body.op in ("const", "int") or has_dropped(value.body):
        return None
    (axis,) = value.axes
    new = axis_of(size_of(axis))
    where = position(new)
    if value.body.op == "perm" and (value.body.args[2],) == axis:
        bijection, inverse, _ = value.body.args
        return [Value((new,), where), Value((new,), perm(bijection, not inverse, where))]
    if value.body.free != frozenset(axis):
        return None
    node = call.tracker.node
    order = sort_of(value.body, axis, None if call["stable"] else node, node.name)
    return [Value((new,), seg(order.keys, where)), Value((new,), perm(order, False, where))]


@rule("aten.topk")
def topk(call: Call) -> Sequence[Value | None]:
    """The selected ids are data; how many experts they choose from is known."""
    return _selection(call, call.out[0], call.out[1])


@rule("aten.max", "aten.min")
def largest(call: Call) -> Sequence[Value | None] | None:
    if not isinstance(call.out, list | tuple) or call["dim"] is None:
        return None
    return _selection(call, call.out[0], call.out[1])


@rule("aten.argmax", "aten.argmin")
def argmax(call: Call) -> Value | None:
    return None if call["dim"] is None else _chosen(call, call.out)


def _selection(call: Call, values: object, ids: object) -> Sequence[Value | None]:
    return [None, _chosen(call, ids)]


def _chosen(call: Call, ids: object) -> Value:
    rank = len(call["self"].shape)
    last = call.dim("dim", rank) == rank - 1
    size = shape_of(call["self"])[call.dim("dim", rank)]
    source = call.value("self")
    leaf = Leaf(ids, call.tracker.node, bound=size, distinct=last, made_by=call.name, inputs=(source,))  # type: ignore[arg-type]
    return leaf_value(leaf, shape_of(ids))  # type: ignore[arg-type]


@rule("aten.bincount")
def bincount(call: Call) -> Value | None:
    if call["weights"] is not None:
        return None
    return counts(call, call.value("self"))


@rule("aten.histc")
def histc(call: Call) -> Value | None:
    """Bins of integers 0..bins-1: exact for the ranges [0, bins] and [0, bins - 1]."""
    bins = call["bins"]
    value = call.value("self")
    if call["min"] != 0 or call["max"] not in (bins, bins - 1) or (value.body.op == "at" and _reads_float(value.body)):
        return None
    return counts(call, value)


def _reads_float(term: Term) -> bool:
    tensor = getattr(term.args[0], "tensor", None)
    return tensor is not None and tensor.is_floating_point()


def counts(call: Call, keys: Value) -> Value | None:
    """How many positions hold each key: one count a key."""
    variables = frozenset(v for axis in keys.axes for v in axis)
    if keys.body.free != variables:
        return None
    axis = axis_of(call.shape[0])
    return Value((axis,), count(keys_of(keys.body), position(axis)))


@rule("aten.searchsorted")
def searchsorted(call: Call) -> Value | None:
    """Where each expert's rows start (or end) among the sorted ids."""
    ids, wanted = call.value("sorted_sequence"), call.value("self")
    if call["sorter"] is not None or len(ids.axes) != 1 or ids.body.op != "seg" or len(ids.axes[0]) != 1:
        return None
    if ids.body.args[1] is not ids.axes[0][0] or call["self"].is_floating_point():
        return None
    keys = ids.body.args[0]
    begin = start(keys, wanted.body)
    right = call["right"] or call["side"] == "right"
    return wanted.with_body(plus(begin, count(keys, wanted.body)) if right else begin)


@rule("aten.sum")
def summed(call: Call) -> Value | None:
    value = call.value("self")
    rank = len(value.axes)
    listed = call["dim"]
    dims = range(rank) if not listed else [call.dim(d, rank) for d in ([listed] if isinstance(listed, int) else listed)]
    body = value.body
    for d in sorted(dims, reverse=True):
        for variable in reversed(value.axes[d]):
            body = total(variable, body)
    keep = call["keepdim"]
    axes = [() if d in dims else axis for d, axis in enumerate(value.axes) if keep or d not in dims]
    return Value(tuple(axes), body)


@rule("aten.any")
def some(call: Call) -> Value | None:
    """Whether a token chose an expert: the sum of the indicators, since its choices differ."""
    value = summed(call)
    if not isinstance(value, Value):
        return None
    body = value.body
    while body.op == "sum":
        _, body = open_sum(body)
    keys = [a for a in body.args if a.op == "at" and a.args[0].distinct] if body.op == "delta" else []
    return value if keys else None


@rule("aten.cumsum")
def cumulated(call: Call) -> Value | None:
    value = call.value("self")
    dim = call.dim("dim")
    axis = value.axes[dim]
    body = value.body
    if not axis:
        return value
    if body.op == "count" and len(axis) == 1 and body.args[1] is axis[0]:
        return value.with_body(plus(start(body.args[0], axis[0]), body))
    if body.op == "count" and len(axis) <= 2:
        begin = segment_start(body, axis)
        return None if begin is None else value.with_body(plus(begin, body))
    if body.op == "delta":
        return _positions_of_key(value, dim)
    return running_count(call, value, dim)


def segment_start(body: Term, axis: tuple[Term, ...]) -> Term | None:
    """The first row of a segment (sender, local expert) in the order of `axis`, major to minor."""
    received = received_from(body)
    if received is None:
        return None
    exchange, source, local = received
    if axis == tuple(t for t in (source, local) if t.op == "var"):
        return block_start(exchange, False, source, local)
    if axis == tuple(t for t in (local, source) if t.op == "var"):
        return block_start(exchange, True, source, local)
    return None


def _positions_of_key(value: Value, dim: int) -> Value | None:
    """A running count of one-hot rows: each row's place among the rows of its expert."""
    axis = value.axes[dim]
    for key, wanted in (value.body.args, reversed(value.body.args)):
        if key.free == frozenset(axis) and not (wanted.free & key.free):
            return value.with_body(running(sort_of(key, axis), wanted, position(axis)))
    return None


@rule("aten.repeat_interleave")
def repeat_interleave(call: Call) -> Value | None:
    """`values.repeat_interleave(counts)`: each row of a segment gets the segment's value."""
    if isinstance(call["repeats"], int):
        return None
    if call["self"] is None:
        return _segments(call, None, call.value("repeats"))
    return _segments(call, call.value("self"), call.value("repeats"))


def _segments(call: Call, values: Value | None, repeats: Value) -> Value | None:
    if len(repeats.axes) != 1 or (values is not None and len(values.axes) != 1):
        return None
    repeats = _of_experts(repeats)
    (axis,) = repeats.axes
    new = axis_of(call.shape[0])
    row = position(new)
    found = _key_of_row(repeats.body, axis, row)
    if found is None:
        return None
    call.facts.set_size(call.shape[0], _all_rows(repeats.body, axis))
    if values is None:
        return Value((new,), substitute(position(axis), found))
    parts = [substitute(v, found) for v in axis]
    where = radix(parts, [v.args[1] for v in axis])
    body = substitute(values.body, values.bind(0, where))
    return Value((new,), body)


def _of_experts(repeats: Value) -> Value:
    """Without the segments behind those of the experts, which are empty."""
    factors = repeats.body.args if repeats.body.op == "mul" else ()
    counted = [f for f in factors if f.op == "count"]
    (axis,) = repeats.axes
    if len(factors) != 2 or len(counted) != 1 or len(axis) != 1 or counted[0].args[1] is not axis[0]:
        return repeats
    experts = axis_of(bound(counted[0].args[0].body) or 0)
    if lt(axis[0], integer(size_of(experts))) not in factors:
        return repeats
    return Value((experts,), substitute(counted[0], {axis[0]: position(experts)}))


def _all_rows(body: Term, axis: tuple[Term, ...]) -> Term:
    """The sum of the segments' lengths."""
    received = received_from(body)
    if received is not None and len(axis) == 2:
        return all_of(received[0].local_keys, received[0].local_experts)
    for variable in reversed(axis):
        body = total(variable, body)
    return body


def _key_of_row(body: Term, axis: tuple[Term, ...], row: Term) -> dict[Term, Term] | None:
    """Which segment row `row` is in, when the segments' lengths are `body` over `axis`."""
    if body.op != "count":
        return None
    if len(axis) == 1 and body.args[1] is axis[0]:
        return {axis[0]: seg(body.args[0], row)}
    received = received_from(body)
    if received is None:
        return None
    exchange, source, local = received
    live = tuple(t for t in (source, local) if t.op == "var")
    if axis == live:
        arrived = row
    elif axis == tuple(reversed(live)):
        arrived = perm(exchange.by_expert, False, row)
    else:
        return None
    found = dict(zip((source, local), exchange.segment_of(arrived), strict=True))
    return {variable: term for variable, term in found.items() if variable.op == "var"}


@rule("aten._local_scalar_dense")
def item(call: Call) -> None:
    value = call.value("self")
    if not call["self"].is_floating_point():
        call.facts.set_scalar(call.out, value.body)
