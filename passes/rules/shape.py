"""Views and layouts: variables move between axes, the element stays."""

from __future__ import annotations

from collections.abc import Sequence

from mokfx.passes.bijections import Keys, all_of
from mokfx.passes.facts import shape_of
from mokfx.passes.rules.table import Call, rule, write_back
from mokfx.passes.scatter import write_segment
from mokfx.passes.terms import Size, Term, apply, as_size, bound, integer, lin, minus, plus, product, start, substitute
from mokfx.passes.value import Axis, Value, axis_of, permute, position, reshape


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten._reshape_alias")
def to_shape(call: Call) -> Value | None:
    return reshape(call.value("self"), call.shape)


@write_back("aten.view", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.alias")
def from_shape(call: Call, base: Value, written: Value) -> Value | None:
    return reshape(written, shape_of(call["self"]))


@rule("aten.alias", "aten.clone", "aten.lift_fresh", "aten.contiguous")
def same(call: Call) -> Value:
    return call.value("self")


@rule("aten.detach")
def detach(call: Call) -> Value | None:
    """A cut gradient: what the graph computed so far is given, or cannot be part of the op."""
    value = call.value("self")
    if not (call.is_float and call.tracker.gradients and call["self"].requires_grad):
        return value
    return value.with_body(apply("detached", value.body)) if value.body.routed else None


@rule("aten.permute")
def permuted(call: Call) -> Value:
    rank = len(call.value("self").axes)
    return permute(call.value("self"), [call.dim(d, rank) for d in call["dims"]])


@rule("aten.transpose")
def transposed(call: Call) -> Value:
    value = call.value("self")
    order = list(range(len(value.axes)))
    a, b = call.dim("dim0"), call.dim("dim1")
    order[a], order[b] = order[b], order[a]
    return permute(value, order)


@rule("aten.t")
def matrix_transposed(call: Call) -> Value:
    value = call.value("self")
    return permute(value, list(reversed(range(len(value.axes)))))


@write_back("aten.transpose", "aten.t")
def transposed_back(call: Call, base: Value, written: Value) -> Value | None:
    if call.name == "aten.t":
        return permute(written, list(reversed(range(len(written.axes)))))
    order = list(range(len(written.axes)))
    a, b = call.dim("dim0", len(order)), call.dim("dim1", len(order))
    order[a], order[b] = order[b], order[a]
    return permute(written, order)


@rule("aten.expand")
def expanded(call: Call) -> Value | None:
    value = call.value("self")
    shape = call.shape
    missing = len(shape) - len(value.axes)
    axes: list[Axis] = [axis_of(size) for size in shape[:missing]]
    for axis, size in zip(value.axes, shape[missing:], strict=True):
        axes.append(axis if axis else axis_of(size))
    return Value(tuple(axes), value.body)


@rule("aten.repeat")
def repeated(call: Call) -> Value | None:
    value = call.value("self")
    repeats = list(call["repeats"])
    missing = len(repeats) - len(value.axes)
    axes = [()] * missing + list(value.axes)
    return Value(tuple((*axis_of(as_size(n)), *axis) for n, axis in zip(repeats, axes, strict=True)), value.body)


@rule("aten.select")
def selected(call: Call) -> Value | None:
    dim, index = call.dim("dim"), call["index"]
    value = call.value("self")
    if isinstance(index, int) and index < 0:
        size = shape_of(call["self"])[dim]
        if not isinstance(size, int):
            return None
        index += size
    return _at(value, dim, call.number(index), ())


def _at(value: Value, dim: int, where: Term, axis: Axis | None) -> Value:
    """Read `dim` at `where`: the dimension becomes `axis`, or goes if that is empty and the op drops it."""
    body = substitute(value.body, value.bind(dim, where))
    axes = list(value.axes)
    axes[dim : dim + 1] = [axis] if axis else []
    return Value(tuple(axes), body)


@rule("aten.slice")
def sliced(call: Call) -> Value | None:
    dim = call.dim("dim")
    value = call.value("self")
    step = call["step"]
    begin = _begin(call, dim)
    if begin is None or not isinstance(step, int):
        return None
    size = call.shape[dim]
    if step == 1 and begin is integer(0) and size == shape_of(call["self"])[dim]:
        return value
    if step == 1:
        _measure(call, dim, begin, size)
    axis = axis_of(size)
    where = plus(begin, lin([(position(axis), step)]))
    body = substitute(value.body, value.bind(dim, where))
    return Value((*value.axes[:dim], axis, *value.axes[dim + 1 :]), body)


def _measure(call: Call, dim: int, begin: Term, size: Size) -> None:
    """Learn a slice's length, where its ends are data: all rows of one key, among rows sorted by their keys."""
    if isinstance(size, int) or call["end"] is None or call.facts.size_term(size).op != "size":
        return
    length = minus(call.number("end"), begin)
    if length.op != "count" or start(*length.args) is not begin:
        return
    if _holds_all(call, length.args[0], shape_of(call["self"])[dim]):
        call.facts.set_size(size, length)


def _holds_all(call: Call, keys: Keys, size: Size) -> bool:
    """Whether a dimension holds a row for each key: else a slice may end before the rows that it names do."""
    experts = bound(keys.body)
    counted = isinstance(experts, int) and call.facts.size_term(size) is all_of(keys, experts)
    return counted or product(v.args[1] for v in keys.variables if v.op == "var") == size


def _begin(call: Call, dim: int) -> Term | None:
    begin = call["start"]
    if begin is None:
        return integer(0)
    if isinstance(begin, int) and begin < 0:
        size = shape_of(call["self"])[dim]
        if not isinstance(size, int):
            return None
        begin = max(begin + size, 0)
    return call.number(begin)


@write_back("aten.slice")
def slice_back(call: Call, base: Value, written: Value) -> Value | None:
    dim = call.dim("dim", len(base.axes))
    begin = _begin(call, dim)
    if call["step"] != 1 or begin is None:
        return None
    return write_segment(call.facts, base, dim, begin, written)


@write_back("aten.select")
def select_back(call: Call, base: Value, written: Value) -> Value | None:
    dim = call.dim("dim", len(base.axes))
    one = Value((*written.axes[:dim], (), *written.axes[dim:]), written.body)
    return write_segment(call.facts, base, dim, call.number("index"), one)


@rule("aten.split_with_sizes", "aten.split")
def split(call: Call) -> Sequence[Value | None]:
    dim = call.dim("dim")
    value = call.value("self")
    begin = integer(0)
    parts: list[Value] = []
    for out in call.out:
        shape = shape_of(out)
        axis = axis_of(shape[dim])
        body = substitute(value.body, value.bind(dim, plus(begin, position(axis))))
        parts.append(Value((*value.axes[:dim], axis, *value.axes[dim + 1 :]), body))
        begin = plus(begin, call.facts.size_term(shape[dim]))
    return parts


@rule("aten.unbind")
def unbound(call: Call) -> Sequence[Value | None]:
    dim, value = call.dim("dim"), call.value("self")
    return [_at(value, dim, integer(i), ()) for i in range(len(call.out))]
