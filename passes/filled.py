"""Tensors that are one number everywhere but at a token's chosen experts: scores that `-inf` masks.

    scores[t, e] = s[t, j] where e = ids[t, j], else fill

A function that takes the fill to 0 gives a tensor that is 0 everywhere else, so it is itself times the indicator of the
choices. Its elements elsewhere are computed from constants, so they take no gradient to anything, whatever they get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mokfx.passes.facts import shape_of
from mokfx.passes.indicators import disjoint, disjoint_over
from mokfx.passes.sums import open_sum
from mokfx.passes.terms import ONE, Substitution, Term, add, at, const, mul, substitute, terms_of, uncast
from mokfx.passes.value import Leaf, Value, leaf_value, position

if TYPE_CHECKING:
    from mokfx.passes.rules.table import Call


@dataclass(eq=False)
class Filled(Leaf):
    """A tensor that is `fill` where the indicator `chosen`, of its own positions, is 0."""

    chosen: Value | None = None
    fill: float = 0.0


def filled(call: Call, chosen: Value, fill: float) -> Value | None:
    """The fact of a tensor that holds data at a token's choices and `fill` elsewhere."""
    if fill not in (-math.inf, math.inf) or not call.is_float or not is_choice(chosen.body):
        return None
    leaf = Filled(call.out, call.tracker.node, made_by=call.name, chosen=chosen, fill=fill)
    return leaf_value(leaf, call.shape)


def vanishing(call: Call, value: Value, fill: float) -> Value | None:
    """The fact of a function's output that is 0 where its input is `fill`, if that is everywhere but at the choices."""
    element = uncast(value.body)
    leaf = element.args[0] if element.op == "at" and isinstance(element.args[0], Filled) else None
    if leaf is None or leaf.chosen is None or leaf.fill != fill or not call.is_float:
        return None
    here = tuple(map(position, value.axes))
    if element is not at(leaf, (), *here) or shape_of(leaf.tensor) != shape_of(call.out):
        return None
    own = leaf_value(Leaf(call.out, call.tracker.node, made_by=call.name, inputs=(value,)), call.shape)
    there: Substitution = {}
    for d, axis in enumerate(own.axes):
        there |= leaf.chosen.bind(d, position(axis))
    return own.with_body(mul([own.body, substitute(leaf.chosen.body, there)]))


def is_choice(term: Term) -> bool:
    """Whether a term is 1 where one of a token's choices, which differ, is an expert, and else 0."""
    if term.op == "sum":
        variable, body = open_sum(term)
        return body.op == "delta" and disjoint_over(variable, body)
    terms = list(terms_of(term))
    return all(t.op == "delta" for t in terms) and disjoint(terms)


def negated(term: Term) -> Term:
    """`1 - m` of an indicator m, which may be written so itself."""
    for part in terms_of(term) if term.op == "add" else ():
        inner = mul([const(-1), part])
        if add([ONE, part]) is term and part.op == "mul" and const(-1) in part.args:
            return inner
    return add([ONE, mul([const(-1), term])])
