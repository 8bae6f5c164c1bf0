"""Elementwise ops that are several in one."""

from __future__ import annotations

from mokfx.passes.rules.table import Call, rule
from mokfx.passes.terms import ONE, add, const, mul
from mokfx.passes.value import Value, align


@rule("aten.addcmul")
def product_added(call: Call) -> Value | None:
    """`self + value * tensor1 * tensor2`; of one number twice, as `h + h * u`, it is `h * (1 + u)`."""
    if not call.is_float:
        return None
    axes, (base, left, right) = align([call.value(name) for name in ("self", "tensor1", "tensor2")])
    factor = const(1.0 if call["value"] is None else float(call["value"]))
    for same, other in ((left, right), (right, left)):
        if same is base:
            return Value(axes, mul([base, add([ONE, mul([factor, other])])]))
    return Value(axes, add([base, mul([factor, left, right])]))
