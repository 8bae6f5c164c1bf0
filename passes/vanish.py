"""Masks that go through a network: where a mask is 0 on the way in, so is what comes out.

    sum_e f(e, sum_j [e = id_j] w_j) = sum_j f(id_j, w_j)        if f(e, 0) = 0, and at most one of the id_j is e

For each e both sides are one function of all that f reads, so they have the same gradients too. A network without
biases is such an f of a mask on its input: 0 goes through each projection and through each activation as 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from mokfx.passes.indicators import disjoint, disjoint_over, replaced
from mokfx.passes.terms import ONE, Term, factors_of, mul, substitute, subterms, terms_of, var

AT_ZERO = frozenset(("cast", "silu", "relu", "tanh", "gelu", "gelu_tanh", "erf"))
"""Functions that are 0 at 0, and have a finite derivative there."""


def chosen(variable: Term, body: Term) -> list[tuple[Term, Term]] | None:
    """Parts that `body` is the sum of, each under the indicator that a choice is `variable`; each with its choice.

    None if `body` does not vanish where nothing is chosen.
    """
    inside = subterms(body) - {body, *factors_of(body)}
    for mask in sorted(t for t in inside if t.op in ("delta", "sum", "add") and variable in t.free <= body.free):
        parts = list(_parts(variable, mask))
        if parts and vanishes(body, mask):
            return [(choice, mul([asked, replaced(body, mask, kept)])) for choice, asked, kept in parts]
    return None


def _parts(variable: Term, mask: Term) -> Iterator[tuple[Term, Term, Term]]:
    """`(choice, [choice is variable], w)` for each summand of a mask of which at most one is not 0."""
    found = []
    for term in terms_of(mask):
        choice = var(term.args[0].args[1]) if term.op == "sum" else ONE
        factors = factors_of(substitute(term.args[1], {term.args[0]: choice}) if term.op == "sum" else term)
        asked = [f for f in factors if f.op == "delta" and variable in f.args]
        if len(asked) != 1 or (choice is not ONE and not disjoint_over(choice, asked[0])):
            return
        found.append((choice, asked[0], mul(f for f in factors if f is not asked[0])))
    if len(found) == 1 or (all(c is ONE for c, _, _ in found) and disjoint([a for _, a, _ in found])):
        yield from found


def vanishes(term: Term, mask: Term) -> bool:
    """Whether a term is 0 where `mask` is."""
    if term is mask:
        return True
    if mask not in subterms(term):
        return False
    if term.op in ("mul", "add"):
        return (any if term.op == "mul" else all)(vanishes(part, mask) for part in term.args)
    if term.op == "sum":
        return vanishes(term.args[1], mask)
    if term.op == "clamp":
        _, low, high = term.args
        return (low is None or low <= 0) and (high is None or high >= 0) and vanishes(term.args[0], mask)
    return term.op in AT_ZERO and vanishes(term.args[0], mask)
