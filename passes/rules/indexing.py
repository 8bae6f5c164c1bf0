"""Reading and writing at computed positions. Reading is substitution; writing is solved for the row that is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mokfx.passes.bijections import sort_of
from mokfx.passes.facts import shape_of
from mokfx.passes.filled import filled
from mokfx.passes.rules.table import Call, rule
from mokfx.passes.scatter import scatter
from mokfx.passes.slots import marks
from mokfx.passes.sums import open_sum, total
from mokfx.passes.terms import (
    ONE,
    ZERO,
    Size,
    Term,
    add,
    apply,
    delta,
    integer,
    mul,
    perm,
    plus,
    start,
    substitute,
    terms_of,
    unflatten,
)
from mokfx.passes.terms import count as count_term
from mokfx.passes.value import Axis, Leaf, Value, align, axis_of, bind, fresh, leaf_value, position, size_of, sizes


@rule("aten.index")
def index(call: Call) -> Value | None:
    resolved = _indices(call, call["indices"], call.shape)
    if resolved is None:
        return None
    return _looked_up(call, _read(call.tracker.given(call["self"]), resolved))


@rule("aten.index_select")
def index_select(call: Call) -> Value | None:
    return _looked_up(call, _read(call.tracker.given(call["self"]), _along(call, call.value("index"))))


@rule("aten.embedding")
def embedding(call: Call) -> Value | None:
    """Rows of a table of vectors are data of their own, such as a model's tokens; an expert's weight is a matrix."""
    value = _read(call.tracker.given(call["weight"]), {0: call.value("indices")})
    if value is None or value.body.routed or not value.body.looked_up:
        return value
    return leaf_value(Leaf(call.out, call.tracker.node, made_by=call.name), call.shape)


def _looked_up(call: Call, value: Value | None) -> Value | None:
    """What is read at positions that are data: a number for each position is data of its own.

    Such are the expert ids of a hash layer, and router weights picked from all experts' scores. A whole row for each
    position is not: it may be an expert's weight.
    """
    body = ZERO if value is None else value.body
    if value is None or body.routed or not body.looked_up or body.op != "at":
        return value
    data = frozenset[Term]().union(*(i.free for i in body.args[2:] if i.op == "at"))
    if call.is_float and data != frozenset(v for axis in value.axes for v in axis):
        return value
    leaf = Leaf(call.out, call.tracker.node, made_by=call.name, definition=value)
    return leaf_value(leaf, call.shape)


def _along(call: Call, where: Value) -> dict[int, Value]:
    return {call.dim("dim", len(shape_of(call["self"]))): where}


def _read(source: Value, where: dict[int, Value]) -> Value | None:
    """Advanced indexing: the indexed dimensions give way to the indices' common axes."""
    dims = sorted(where)
    axes, bodies = align([where[d] for d in dims])
    source = fresh(source)
    mapping = {}
    for d, body in zip(dims, bodies, strict=True):
        mapping.update(source.bind(d, body))
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    rest = [axis for d, axis in enumerate(source.axes) if d not in where]
    at = dims[0] if adjacent else 0
    return Value((*rest[:at], *axes, *rest[at:]), substitute(source.body, mapping))


def _indices(call: Call, indices: Sequence[torch.Tensor | None], shape: Sequence[Size]) -> dict[int, Value] | None:
    """The index of each indexed dimension; a mask counts as the positions where it holds."""
    resolved: dict[int, Value] = {}
    d = 0
    for item in indices:
        if item is None:
            d += 1
        elif item.dtype in (torch.bool, torch.uint8):
            first = min(resolved, default=d)
            found = positions(call, call.value(item), shape[first])
            if found is None:
                return None
            for value in found:
                resolved[d] = value
                d += 1
        else:
            resolved[d] = call.value(item)
            d += 1
    return resolved


def positions(call: Call, mask: Value, count: Size) -> list[Value] | None:
    """For each dimension of a mask `key == e`, the positions where it holds, in row-major order."""
    variables = [v for axis in mask.axes for v in axis]
    body, order = mask.body, list(variables)
    while body.op == "sum":
        variable, body = open_sum(body)
        order.append(variable)
    if body.op != "delta":
        return None
    for key, wanted in (body.args, reversed(body.args)):
        if key.free == frozenset(order) and not (wanted.free & key.free):
            if len(order) > len(variables) and not _distinct(key):
                return None
            break
    else:
        return None
    sort = sort_of(key, order)
    axis = axis_of(count)
    if not isinstance(count, int):
        call.facts.set_size(count, count_term(sort.keys, wanted))
    row = perm(sort, False, plus(start(sort.keys, wanted), position(axis)))
    parts = dict(zip(order, unflatten(row, sizes(order)), strict=True))
    return [Value((axis,), substitute(position(a), parts)) for a in mask.axes]


def _distinct(key: Term) -> bool:
    return key.op == "at" and getattr(key.args[0], "distinct", False)


@rule("aten.nonzero", "aten.nonzero_numpy")
def nonzero(call: Call) -> Value | Sequence[Value] | None:
    if isinstance(call.out, list | tuple):
        return positions(call, call.value("self"), shape_of(call.out[0])[0])
    found = positions(call, call.value("self"), call.shape[0])
    if found is None or len(found) != 1:
        return _columns(found)
    return Value((*found[0].axes, ()), found[0].body)


def _columns(found: list[Value] | None) -> Value | None:
    """An index matrix: its column d is the position along dimension d."""
    if not found:
        return None
    axis = axis_of(len(found))
    column = position(axis)
    bodies = [substitute(v.body, dict(zip(v.axes[0], found[0].axes[0], strict=True))) for v in found]
    body = add(mul([delta(column, integer(d)), b]) for d, b in enumerate(bodies))
    return Value((found[0].axes[0], axis), body)


@rule("aten.gather")
def gather(call: Call) -> Value | None:
    source, where = call.tracker.given(call["self"]), call.value("index")
    dim = call.dim("dim", len(where.axes))
    source = fresh(source)
    mapping = source.bind(dim, where.body)
    for d, axis in enumerate(where.axes):
        if d != dim:
            mapping |= bind(source.axes[d], position(axis))
    value = Value(where.axes, substitute(source.body, mapping))
    return _number_of_slot(call, where) or _looked_up(call, value)


def _number_of_slot(call: Call, where: Value) -> Value | None:
    """What is picked of all experts' for each choice of a token is data of its own: a router weight."""
    ids = where.body.args[0] if where.body.op == "at" else None
    slots = frozenset(v for axis in where.axes for v in axis)
    if not (call.is_float and isinstance(ids, Leaf) and ids.bound is not None and where.body.free == slots):
        return None
    source = call.value("self")
    if len(source.axes) != 2 or shape_of(call["self"])[1] != ids.bound or not source.body.routed or source.body.perms:
        return None
    return leaf_value(Leaf(call.out, call.tracker.node, made_by=call.name), call.shape)


# -- writing -------------------------------------------------------------------------------------------------------


@rule("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(call: Call) -> Value | None:
    base = call.value("self")
    values = call.value("values")
    rank = len(base.axes)
    indices = call["indices"]
    count = shape_of(call["values"])[0] if values.axes else 1
    resolved = _indices(call, indices, [count] * rank)
    if resolved is None:
        return None
    dims = sorted(resolved)
    if dims != list(range(len(dims))):
        return None
    axes, bodies = align([resolved[d] for d in dims])
    return _write(call, base, axes, dict(zip(dims, bodies, strict=True)), values, bool(call["accumulate"]))


def _write(
    call: Call, base: Value, axes: tuple[Axis, ...], where: dict[int, Term], values: Value, accumulate: bool
) -> Value | None:
    """`base[where] = values`, where the indices range over `axes` and the other dimensions are whole."""
    whole = [d for d in range(len(base.axes)) if d not in where]
    frame = (*axes, *(axis_of(size_of(base.axes[d])) for d in whole))
    full, bodies = align([*(Value(frame, body) for body in where.values()), values])
    source = Value(full, bodies[-1])
    where = dict(zip(where, bodies, strict=False))
    dims = {d: len(axes) + i for i, d in enumerate(whole)}
    attempts = [(source, accumulate, False)]
    increment = None if accumulate else _increment(base, where, source, dims)
    if increment is not None:
        attempts.insert(1 if base.body is ZERO else 0, (increment, True, True))
    written = (scatter(call.facts, base, where, rows, dims, add_up, once) for rows, add_up, once in attempts)
    return next((value for value in written if value is not None), None)


def _increment(base: Value, where: dict[int, Term], source: Value, dims: dict[int, int]) -> Value | None:
    """`base[i] = base[i] + v` adds v: what remains of the source once `base[i]` is taken away."""
    if base.body.op == "const":
        return source if base.body is ZERO else None
    again = fresh(base)
    mapping = {}
    for d in range(len(base.axes)):
        mapping.update(again.bind(d, where[d] if d in where else source.position(dims[d])))
    rest = list(terms_of(source.body))
    for term in terms_of(substitute(again.body, mapping)):
        if term not in rest:
            return None
        rest.remove(term)
    return source.with_body(add(rest))


@rule("aten.index_add", "aten.index_copy", "aten.index_reduce")
def index_add(call: Call) -> Value | None:
    base, where = call.value("self"), call.value("index")
    source = call.value("source")
    if call.name == "aten.index_reduce":
        return None
    dim = call.dim("dim", len(base.axes))
    if call["alpha"] not in (None, 1):
        source = source.with_body(mul([call.value(call["alpha"]).body, source.body]))
    axes, (position_of, body) = align([Value((where.axes[0], *[()] * (len(base.axes) - 1 - dim)), where.body), source])
    source = Value(axes, body)
    source = Value(axes, apply("cast", body, call["self"].dtype)) if _narrows(call) else source
    dims = {d: d for d in range(len(base.axes)) if d != dim}
    accumulate = call.name == "aten.index_add"
    result = scatter(call.facts, base, {dim: position_of}, source, dims, accumulate)
    plain = result is None and accumulate and not position_of.routed
    return _one_hot(call, base, Value(axes, position_of), source.body, dim, True) if plain else result


def _narrows(call: Call) -> bool:
    source = call["source"]
    return bool(source.is_floating_point() and source.dtype != call["self"].dtype)


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter_along(call: Call) -> Value | None:
    base, where = call.value("self"), call.value("index")
    dim = call.dim("dim", len(base.axes))
    if call.name == "aten.scatter_reduce" and call["reduce"] != "sum":
        return None
    if call["reduce"] is not None and call.name == "aten.scatter":
        return None
    source = call["src"] if call["src"] is not None else call["value"]
    axes, (position_of, body) = align([where, call.value(source)])
    accumulate = call.name != "aten.scatter"
    dims = {d: d for d in range(len(base.axes)) if d != dim}
    result = scatter(call.facts, base, {dim: position_of}, Value(axes, body), dims, accumulate)
    if result is None:
        result = _one_hot(call, base, Value(axes, position_of), body, dim, accumulate)
    if result is None and not accumulate and base.body.op == "const":
        chosen = _one_hot(call, base.with_body(ZERO), Value(axes, position_of), ONE, dim, False)
        result = None if chosen is None else filled(call, chosen, base.body.args[0])
    return marks(call, dim) if result is None and not accumulate else result


def _one_hot(call: Call, base: Value, where: Value, body: Term, dim: int, accumulate: bool) -> Value | None:
    """Writing at positions that are data: an indicator of the positions, summed over what shares a target."""
    if base.body not in (ZERO, integer(0)):
        return None
    if not accumulate and not (_distinct(where.body) or len(where.axes[dim]) == 0):
        return None
    if not where.body.free or (body is not ONE and body is not integer(1) and not call.is_float):
        return None
    axes = list(where.axes)
    axes[dim] = axis_of(size_of(base.axes[dim]))
    target = position(axes[dim])
    result = mul([delta(target, where.body), ONE if body is integer(1) else body])
    for variable in reversed(where.axes[dim]):
        result = total(variable, result)
    return Value(tuple(axes), result)
