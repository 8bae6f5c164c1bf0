"""Sums over a range: where one-hot factors become indexing, and indicators become counts."""

from __future__ import annotations

from mokfx.passes.bijections import keys_of
from mokfx.passes.indicators import not_negative
from mokfx.passes.queues import find
from mokfx.passes.terms import (
    Term,
    add,
    at_most,
    bound,
    const,
    count,
    factors_of,
    integer,
    lin,
    lt,
    make,
    mul,
    received_from,
    substitute,
    valid,
    var,
)
from mokfx.passes.vanish import chosen


def total(variable: Term, body: Term) -> Term:
    """The sum of `body` over all values of `variable`, simplified."""
    if variable.op != "var":
        return body
    if body.op == "add":
        return add(total(variable, term) for term in body.args)
    if body.op == "lin" and any(t.op in ("delta", "mul", "sum") for t, _ in body.args[1]):
        size = variable.args[1]
        return lin([(total(variable, t), c) for t, c in body.args[1]], body.args[0] * size)
    if body.op == "valid" and variable not in body.args[0].free:
        return valid(body.args[0], total(variable, body.args[1]))
    for rule in (_constant, _pick, _find, _pick_inside, _pull_in, _count, _count_block):
        result = rule(variable, body)
        if result is not None:
            return result
    if body.routed and _has_delta(body, variable) and (parts := chosen(variable, body)) is not None:
        return add(total(choice, total(variable, part)) for choice, part in parts)
    return close(variable, body)


def close(variable: Term, body: Term) -> Term:
    """The unsimplified sum, its bound variable named by depth so that equal sums are one term."""
    bound_variable = make("var", ("b", body.depth + 1), variable.args[1])
    return make("sum", bound_variable, substitute(body, {variable: bound_variable}))


def open_sum(term: Term) -> tuple[Term, Term]:
    """A fresh variable and the body of a sum over it."""
    bound_variable, body = term.args
    fresh = var(bound_variable.args[1])
    return fresh, substitute(body, {bound_variable: fresh})


def _constant(variable: Term, body: Term) -> Term | None:
    size = variable.args[1]
    if variable in body.free or not isinstance(size, int):
        return None
    return lin([(body, size)]) if body.op in ("lin", "int", "count", "start") else mul([const(size), body])


def _pick(variable: Term, body: Term) -> Term | None:
    """`sum_v delta(v, X) f(v) = f(X)`."""
    condition, body = (body.args[0], body.args[1]) if body.op == "valid" else (None, body)
    factors = factors_of(body)
    for i, factor in enumerate(factors):
        if factor.op != "delta" or variable not in factor.args:
            continue
        other = factor.args[1] if factor.args[0] is variable else factor.args[0]
        if variable in other.free or not not_negative(other):
            continue
        rest = [*factors[:i], *factors[i + 1 :], *_in_range(other, variable)]
        if condition is not None:
            rest = [valid(condition, mul(rest))]
        return substitute(mul(rest), {variable: other})
    return None


def _pick_inside(variable: Term, body: Term) -> Term | None:
    """`sum_v sum_j delta(v, X_j) f(v, j)` is a sum over j of f(X_j, j)."""
    if body.op != "sum" or not _has_delta(body, variable):
        return None
    inner, inside = open_sum(body)
    picked = _pick(variable, inside)
    if picked is None:
        picked = _pick_inside(variable, inside)
    return None if picked is None else total(inner, picked)


def _in_range(index: Term, variable: Term) -> list[Term]:
    """The factor that keeps `delta(v, index)` zero where `index` is outside the range of `v`.

    An expert id of unknown range is inside by contract: -1 marks a dropped slot here and in the op alike.
    """
    limit = bound(index)
    inside = index.op in ("at", "seg") if limit is None else at_most(limit, variable.args[1])
    return [] if inside else [lt(index, integer(variable.args[1]))]


def _find(variable: Term, body: Term) -> Term | None:
    return find(variable, body) if body.perms and body.op in ("mul", "sum") else None


def _pull_in(variable: Term, body: Term) -> Term | None:
    """Move a one-hot sum to the outside: `sum_v (sum_j delta(v, X_j) g_j) f(v)` is a sum over j first."""
    factors = factors_of(body.args[1] if body.op == "valid" else body)
    for i, factor in enumerate(factors):
        if len(factors) > 1 and factor.op in ("sum", "add") and _has_delta(factor, variable):
            rest = [*factors[:i], *factors[i + 1 :]]
            wrap = [body.args[0]] if body.op == "valid" else []
            if factor.op == "add":
                return add(_under(wrap, variable, mul([term, *rest])) for term in factor.args)
            inner, inside = open_sum(factor)
            return total(inner, _under(wrap, variable, mul([inside, *rest])))
    return None


def _under(conditions: list[Term], variable: Term, body: Term) -> Term:
    return total(variable, valid(conditions[0], body) if conditions else body)


def _has_delta(term: Term, variable: Term) -> bool:
    todo = [term]
    while todo:
        node = todo.pop()
        if variable not in node.free:
            continue
        if node.op == "delta" and variable in node.args:
            return True
        todo.extend(a for a in node.args if isinstance(a, Term))
    return False


def _count(variable: Term, body: Term) -> Term | None:
    """`sum over all slots of delta(e, key(slot))` counts the slots of e."""
    variables = {variable}
    while body.op == "sum":
        inner, body = open_sum(body)
        variables.add(inner)
    if body.op != "delta":
        return None
    for key, other in (body.args, reversed(body.args)):
        if key.free == variables and not (other.free & variables):
            return count(keys_of(key), other)
    return None


def _count_block(variable: Term, body: Term) -> Term | None:
    """Counts summed over the senders, or over a known block of experts."""
    if body.op != "count":
        return None
    received = received_from(body)
    if received is not None and received[1] is variable:
        exchange, _, local = received
        return count(exchange.local_keys, local)
    size = variable.args[1]
    if body.free == {variable} and isinstance(size, int):
        return lin((substitute(body, {variable: integer(i)}), 1) for i in range(size))
    return None
