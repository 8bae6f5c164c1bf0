"""Matrix products: sums over a shared dimension. A grouped product reads the weight of each row's expert."""

from __future__ import annotations

from mokfx.passes.rules.table import Call, rule
from mokfx.passes.sums import total
from mokfx.passes.terms import Substitution, Term, add, minus, mul, seg, start, substitute
from mokfx.passes.value import Value, align, bind, fresh, position


def product(left: Value, right: Value) -> Value:
    """`[..., m, k] @ [..., k, n]` with equal leading axes."""
    right = fresh(right)
    mapping: Substitution = {}
    for a, b in zip(left.axes[:-2], right.axes[:-2], strict=True):
        mapping |= bind(b, position(a))
    inner = max(left.axes[-1], right.axes[-2], key=len)
    left_body = substitute(left.body, bind(left.axes[-1], position(inner)) if left.axes[-1] != inner else {})
    mapping |= bind(right.axes[-2], position(inner)) if right.axes[-2] != inner else {}
    body = mul([left_body, substitute(right.body, mapping)])
    for variable in reversed(inner):
        body = total(variable, body)
    return Value((*left.axes[:-1], right.axes[-1]), body)


@rule("aten.mm", "aten.bmm")
def matrix_product(call: Call) -> Value:
    return product(call.value("self"), call.value("mat2"))


@rule("aten.mv")
def matrix_vector(call: Call) -> Value:
    vector = call.value("vec")
    result = product(call.value("self"), Value((*vector.axes, ()), vector.body))
    return Value(result.axes[:-1], result.body)


@rule("aten.addmm", "aten.baddbmm")
def matrix_product_with_bias(call: Call) -> Value | None:
    if call["alpha"] != 1 or call["beta"] != 1:
        return None
    names = ("mat1", "mat2") if call.name == "aten.addmm" else ("batch1", "batch2")
    result = product(call.value(names[0]), call.value(names[1]))
    axes, (body, bias) = align([result, call.value("self")])
    return Value(axes, add([body, bias]))


@rule("aten._grouped_mm", "aten._scaled_grouped_mm")
def grouped_product(call: Call) -> Value | None:
    """Rows in order of their group against one matrix a group: `out[r] = rows[r] @ weight[group of r]`."""
    rows, weight, offsets = call.value("self"), call.value("mat2"), call["offs"]
    if call.name != "aten._grouped_mm" or offsets is None or call["bias"] is not None:
        return None
    if len(rows.axes) != 2 or len(weight.axes) != 3:
        return None
    keys = counted_by(call.value(offsets))
    if keys is None:
        return None
    row = position(rows.axes[0])
    weight = fresh(weight)
    chosen = Value(weight.axes[1:], substitute(weight.body, weight.bind(0, seg(keys, row))))
    return product(rows, chosen) if not _clash(rows, chosen) else None


def _clash(rows: Value, chosen: Value) -> bool:
    return bool({v for a in rows.axes for v in a} & {v for a in chosen.axes for v in a})


def counted_by(offsets: Value) -> Term | None:
    """The keys whose counts, summed up to and including each key, are these offsets."""
    (axis,) = offsets.axes
    body = offsets.body
    where = position(axis)
    if body.op == "lin":
        for term, _ in body.args[1]:
            if term.op == "count" and term.args[1] is where and minus(body, term) is start(term.args[0], where):
                keys: Term = term.args[0]
                return keys
    return None
