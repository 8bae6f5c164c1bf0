"""Elementwise ops: index arithmetic on integers, terms of the expert network on floats."""

from __future__ import annotations

import math

import torch

from mokfx.passes.facts import EMPTY
from mokfx.passes.filled import filled, negated, vanishing
from mokfx.passes.indicators import is_kept, not_negative
from mokfx.passes.presence import presence
from mokfx.passes.rules.table import Call, rule
from mokfx.passes.slots import rest, row_of, smaller
from mokfx.passes.sums import open_sum, total
from mokfx.passes.terms import (
    CONDITIONS,
    ONE,
    Size,
    Term,
    add,
    apply,
    as_size,
    bound,
    choose,
    const,
    delta,
    div,
    factors_of,
    integer,
    lin,
    local_expert,
    lt,
    minus,
    mod,
    mul,
    valid,
)
from mokfx.passes.value import Leaf, Value, align, axis_of, leaf_value, position

INDEX = frozenset(
    ["var", "int", "lin", "div", "mod", "perm", "swap", "seg", "count", "start", "running", "choose", "size", "at"]
)


def _is_index(call: Call, term: Term) -> bool:
    if term.op == "mul":
        return all(_is_index(call, f) or _is_indicator(f) for f in term.args)
    return term.op in INDEX or (term.op == "const" and term.args[0].is_integer())


def _combine(call: Call, names: tuple[str, ...] = ("self", "other")) -> tuple[Value, list[Term]]:
    axes, bodies = align([call.value(name) for name in names])
    return Value(axes, ONE), [_real(b) for b in bodies] if call.is_float else bodies


def _real(term: Term) -> Term:
    """A whole number among floats is a float: `1 + u` is `1.0 + u`."""
    return const(term.args[0]) if term.op == "int" and isinstance(term.args[0], int) else term


def _sum(call: Call, left: Term, right: Term, factor: float) -> Term:
    if not call.is_float:
        whole = int(factor)
        return lin([(left, 1), (right, whole)])
    return add([left, mul([const(factor), right])])


@rule("aten.add", "aten.sub")
def added(call: Call) -> Value:
    shape, (left, right) = _combine(call)
    sign = 1 if call.name == "aten.add" else -1
    alpha = call["alpha"] if call["alpha"] is not None else 1
    body = _sum(call, left, right, sign * alpha)
    if call.name == "aten.sub" and body is left:
        # Less 0: on the first rank the local expert of a received row, as it is on the others.
        body = local_expert(body, 0) or body
    return shape.with_body(body)


@rule("aten.rsub")
def subtracted_from(call: Call) -> Value:
    shape, (left, right) = _combine(call)
    return shape.with_body(_sum(call, right, left, -1))


@rule("aten.neg")
def opposite(call: Call) -> Value:
    value = call.value("self")
    body = mul([const(-1), value.body]) if call.is_float else lin([(value.body, -1)])
    return value.with_body(body)


@rule("aten.mul", "aten.logical_and", "aten.bitwise_and")
def multiplied(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    if call.name != "aten.mul" and (call.is_float or call.out.dtype != torch.bool):
        return None
    if not call.is_float:
        for a, b in ((left, right), (right, left)):
            factor = a.args[0] if a.op in ("int", "const") else None
            if factor is not None and _is_index(call, b):
                return shape.with_body(lin([(b, int(factor) if isinstance(factor, float) else factor)]))
        for a, b in ((left, right), (right, left)):
            if a.op == "size" and _is_index(call, b):
                return shape.with_body(lin([(b, a.args[0])]))
    return shape.with_body(mul([left, right]))


@rule("aten.div", "aten.floor_divide")
def divided(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    floor = call.name == "aten.floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    if not call.is_float:
        by = _divisor(right)
        return shape.with_body(div(left, by)) if floor and by is not None and _not_negative(left) else None
    if floor:
        return None
    if right.op in ("const", "int") and right.args[0] != 0:
        return shape.with_body(mul([left, const(1.0 / right.args[0])]))
    return shape.with_body(apply("ratio", left, right)) if left.routed or right.routed else None


def _divisor(term: Term) -> Size | None:
    """What is divided by; zero is a number of tokens, for nothing else can be divided by it."""
    if term.op not in ("int", "size", "const"):
        return None
    by = int(term.args[0]) if term.op == "const" else term.args[0]
    return EMPTY if by == 0 else by


@rule("aten.remainder", "aten.fmod")
def remainder(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    by = _divisor(right)
    if call.is_float or by is None or not _not_negative(left):
        return None
    if call.name == "aten.remainder" and _hashes(left) and isinstance(by, int) and by > 0:
        leaf = Leaf(call.out, call.tracker.node, bound=by, made_by=call.name)
        return leaf_value(leaf, call.shape)
    return shape.with_body(mod(left, by))


def _hashes(term: Term) -> bool:
    """Whether a number mixes data of unknown range: its remainder is data of its own, such as a hash layer's ids."""
    return term.op != "at" and not term.routed and bound(term) is None and _reads_data(term)


def _reads_data(term: Term) -> bool:
    return term.op == "at" or (term.op == "lin" and any(_reads_data(t) for t, _ in term.args[1]))


def _not_negative(term: Term) -> bool:
    """Floor division of a negative number is another number; expert ids are not negative by contract."""
    if term.op == "lin":
        constant, parts = term.args
        signs = isinstance(constant, int) and constant >= 0
        return signs and all(_not_negative(t) and not (isinstance(c, int) and c < 0) for t, c in parts)
    return term.op in INDEX


@rule("aten.eq")
def equal(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    left, right = _whole(left), _whole(right)
    if not (_is_index(call, left) and _is_index(call, right)):
        return None
    return shape.with_body(delta(left, right))


@rule("aten.ne")
def unequal(call: Call) -> Value | None:
    """Where a routed value is not 0."""
    value = call.value("self")
    if call["other"] != 0 or isinstance(call["other"], torch.Tensor) or not value.body.routed:
        return None
    body = presence(value.body, call["self"].is_floating_point())
    return None if body is None else value.with_body(body)


@rule("aten.lt", "aten.gt", "aten.le", "aten.ge")
def compared(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    left, right = _whole(left), _whole(right)
    if not (_is_index(call, left) and _is_index(call, right)):
        return None
    if call.name in ("aten.gt", "aten.ge"):
        left, right = right, left
    if call.name in ("aten.le", "aten.ge"):
        right = lin([(right, 1)], 1)
    asked = lt(left, right)
    kept = is_kept(asked)
    if kept is not None:
        return shape.with_body(lt(integer(-1), kept))
    return shape.with_body(asked) if left.routed or right.routed else None


@rule("aten.minimum")
def smaller_of(call: Call) -> Value | None:
    shape, (left, right) = _combine(call)
    return None if call.is_float else smaller(call, shape.axes, left, right)


def _whole(term: Term) -> Term:
    return integer(int(term.args[0])) if term.op == "const" and term.args[0].is_integer() else term


VANISHING = frozenset(("aten.sigmoid", "aten.relu", "aten.exp", "aten.softplus"))
"""Functions of minus infinity that are 0, as are their derivatives."""


@rule("aten.silu", "aten.sigmoid", "aten.relu", "aten.tanh", "aten.exp", "aten.softplus", "aten.sqrt", "aten.abs")
@rule("aten.erf")
def function(call: Call) -> Value | None:
    value = call.value("self")
    if call.name == "aten.softplus" and (call["beta"], call["threshold"]) != (1, 20):
        return None
    if call.name in VANISHING and (known := vanishing(call, value, -math.inf)) is not None:
        return known
    return value.with_body(apply(call.name.removeprefix("aten."), value.body)) if call.is_float else None


@rule("aten._softmax", "aten.softmax")
def softmax(call: Call) -> Value | None:
    """Data of its own, 0 where scores are masked."""
    return vanishing(call, call.value("self"), -math.inf)


@rule("aten.gelu")
def gelu(call: Call) -> Value:
    value = call.value("self")
    return value.with_body(apply("gelu_tanh" if call["approximate"] == "tanh" else "gelu", value.body))


@rule("aten.pow")
def power(call: Call) -> Value | None:
    value = call.value("self")
    if call.is_float and call["exponent"] == 2:
        return value.with_body(mul([value.body, value.body]))
    return None


@rule("aten.clamp", "aten.clamp_min", "aten.clamp_max")
def clamped(call: Call) -> Value | None:
    value = call.value("self")
    low, high = call["min"], call["max"]
    if not call.is_float and low is None and isinstance(high, torch.SymInt) and not call.number(high).routed:
        top = integer(as_size(high))
        return value.with_body(choose(lt(value.body, top), value.body, top))
    if any(limit is not None and not isinstance(limit, int | float) for limit in (low, high)):
        return None
    if not call.is_float:
        limit = bound(value.body)
        if low is not None and (low > 0 or not not_negative(value.body)):
            return None
        if high is None or (isinstance(limit, int) and high >= limit - 1):
            return value
        top = integer(int(high))
        return value.with_body(choose(lt(value.body, top), value.body, top)) if value.body.routed else None
    if low == 0 and high is None:
        return value.with_body(apply("relu", value.body))
    limits = (None if low in (None, -math.inf) else float(low), None if high in (None, math.inf) else float(high))
    return value if limits == (None, None) else value.with_body(apply("clamp", value.body, *limits))


@rule("aten._to_copy")
def converted(call: Call) -> Value | None:
    """A cast of data is a cast; a cast of whole numbers that keeps them is nothing."""
    value = call.value("self")
    source, target = call["self"].dtype, call.out.dtype
    if source == target or (value.body.op == "const" and not target.is_complex):
        return value
    if target == torch.bool and value.body.routed:
        body = presence(value.body, source.is_floating_point)
        return None if body is None else value.with_body(body)
    if source.is_floating_point and target.is_floating_point:
        return value if _whole_number(value.body) else value.with_body(_rounded(value.body, target))
    if source.is_complex or target.is_complex or not (_whole_number(value.body) or not source.is_floating_point):
        return None
    small = (target.is_floating_point and target.itemsize < 4) or target == torch.bool or target.itemsize == 1
    return None if small and not _is_indicator(value.body) else value


def _rounded(term: Term, dtype: torch.dtype) -> Term:
    """A cast, moved into a mask to the numbers that its indicators select: an indicator is exact in any dtype."""
    if term.op == "valid":
        return valid(term.args[0], _rounded(term.args[1], dtype))
    if term.op == "add" and all(_is_mask(part) for part in term.args):
        return add(_rounded(part, dtype) for part in term.args)
    if term.op == "sum" and _is_mask(term):
        variable, body = open_sum(term)
        return total(variable, _rounded(body, dtype))
    if term.op == "mul" and _is_mask(term):
        kept = [factor for factor in term.args if _selects(factor)]
        rest = mul(factor for factor in term.args if not _selects(factor))
        return mul([*kept, _rounded(rest, dtype)])
    return term if _selects(term) or term.op == "const" else apply("cast", term, dtype)


def _is_mask(term: Term) -> bool:
    """Whether indicators select where a number counts."""
    return _is_mask(term.args[1]) if term.op == "sum" else any(_selects(factor) for factor in factors_of(term))


def _selects(term: Term) -> bool:
    return term.op != "const" and _is_indicator(term)


def _whole_number(term: Term) -> bool:
    """Whether a term is a whole number even where its tensor is a float one."""
    if term.op == "at":
        tensor = getattr(term.args[0], "tensor", None)
        return tensor is not None and not tensor.is_floating_point()
    return term.op in INDEX or _is_indicator(term)


def _is_indicator(term: Term) -> bool:
    if term.op in ("mul", "add", "sum"):
        return all(_is_indicator(a) for a in term.args if a.op != "var")
    return term.op in CONDITIONS or (term.op == "const" and term.args[0] in (0.0, 1.0, -1.0))


@rule("aten.masked_fill")
def masked_fill(call: Call) -> Value | None:
    """Filling with zero multiplies by the mask's complement; a mask that is nowhere set fills nothing."""
    axes, (body, mask) = align([call.value("self"), call.value("mask")])
    if mask is const(0):
        return Value(axes, body)
    if (masked := filled(call, Value(axes, negated(mask)), call["value"])) is not None:
        return masked
    if call["value"] != 0 or not mask.routed or not call.is_float:
        return None
    return Value(axes, mul([body, add([ONE, mul([const(-1), mask])])]))


@rule("aten.logical_not", "aten.bitwise_not")
def complement(call: Call) -> Value | None:
    value = call.value("self")
    return value.with_body(negated(value.body)) if call["self"].dtype == torch.bool and value.body.routed else None


@rule("aten.where")
def where(call: Call) -> Value | None:
    """Choosing between a value and zero multiplies by the condition."""
    if call["self"] is None:
        return None
    axes, (condition, left, right) = align([call.value(name) for name in ("condition", "self", "other")])
    if not call.is_float and right is integer(-1):
        return rest(call, axes, condition, left)
    if right.op == "const" and (masked := filled(call, Value(axes, condition), right.args[0])) is not None:
        return masked
    condition, left = row_of(condition, left) or (condition, left)
    if not condition.routed:
        return None
    if not call.is_float:
        whole = _is_index(call, left) and _is_index(call, right) and _is_indicator(condition)
        return Value(axes, choose(condition, _whole(left), _whole(right))) if whole else None
    if right is const(0) or right is integer(0):
        return Value(axes, mul([condition, left]))
    if left is const(0) or left is integer(0):
        return Value(axes, mul([right, add([ONE, mul([const(-1), condition])])]))
    return None


@rule("aten.copy")
def copied(call: Call) -> Value | None:
    """Overwriting: the new element, broadcast to the target's axes."""
    target, source = call.value("self"), call.value("src")
    axes, (_, body) = align([target, source])
    if call["src"].dtype != call["self"].dtype and call.is_float:
        body = apply("cast", body, call["self"].dtype)
    return Value(axes, body)


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.empty", "aten.empty_like", "aten.new_empty")
@rule("aten.empty_strided", "aten.new_empty_strided", "aten.zero", "aten.ones", "aten.ones_like", "aten.new_ones")
@rule("aten.full", "aten.full_like", "aten.new_full", "aten.fill", "aten.scalar_tensor")
def constant(call: Call) -> Value | None:
    """A constant; memory that nothing wrote counts as zero, since no right program reads it."""
    fill: object = 1.0 if "ones" in call.name else 0.0
    for name in ("fill_value", "value", "s"):
        fill = call[name] if call[name] is not None else fill
    if isinstance(fill, torch.Tensor):
        filled = call.value(fill)
        fill = filled.body.args[0] if filled.body.op in ("const", "int") else None
    axes = tuple(axis_of(size) for size in call.shape)
    if isinstance(fill, torch.SymInt) and not call.is_float and not call.number(fill).routed:
        return Value(axes, integer(as_size(fill)))
    if not isinstance(fill, int | float):
        return None
    return Value(axes, const(float(fill)) if call.is_float else integer(int(fill)))


@rule("aten.arange")
def arange(call: Call) -> Value | None:
    begin = call["start"] if call["start"] is not None else 0
    step = call["step"] if call["step"] is not None else 1
    if not isinstance(step, int) or isinstance(begin, float):
        return None
    axis = axis_of(call.shape[0])
    where = lin([(position(axis), step)])
    return Value((axis,), minus(where, lin([(call.number(begin), -1)])))
