"""Where a routed value is not 0: a mask of the places that hold a router weight."""

from __future__ import annotations

from mokfx.passes.indicators import disjoint, disjoint_over
from mokfx.passes.sums import open_sum, total
from mokfx.passes.terms import CONDITIONS, Term, add, const, mul, nonzero


def presence(term: Term, floating: bool) -> Term | None:
    """1 where `term` is not 0, else 0; None unless at most one of the terms of a sum is not 0.

    The weight itself stays as the factor `nonzero(weight)`: a weight that is exactly 0 leaves its place
    empty, and times that weight an empty place gives what the token's row would give, 0. (Only the gradient
    of such a weight is another: the op gives that of the token's row.)
    """
    if term.op in CONDITIONS:
        return term
    if term.op == "const":
        return const(term.args[0] != 0)
    if term.op == "mul":
        parts = [presence(f, floating) for f in term.args]
        numbers = [f for f in term.args if f.op not in CONDITIONS]
        # The product of two numbers that are not 0 may be rounded to 0.
        return mul(p for p in parts if p is not None) if None not in parts and len(numbers) <= 1 else None
    if term.op == "add":
        parts = [presence(t, floating) for t in term.args]
        known = [p for p in parts if p is not None]
        return add(known) if len(known) == len(parts) and disjoint(known) else None
    if term.op == "sum":
        variable, body = open_sum(term)
        inner = presence(body, floating)
        return total(variable, inner) if inner is not None and disjoint_over(variable, inner) else None
    return nonzero(term) if floating and term.op == "at" and not term.routed else None
