"""Mixtures of all experts: each token's output is a sum over every expert, weighed by a softmax.

There is no top-k to speak of, so nothing is routed and no term says so. What gives such a layer away is the sum: over
softmax weights times the outputs of networks of two projections each, whose matrices are the expert's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mokfx.passes.network import expanded
from mokfx.passes.sums import open_sum
from mokfx.passes.takers import is_given
from mokfx.passes.terms import Term, at, children_of, parts_of, terms_of, uncast
from mokfx.passes.value import Leaf, Stack, Value

RESCALED = frozenset(("aten._softmax", "aten.softmax", "aten.div", "aten.mul", "aten._to_copy"))


@dataclass(frozen=True)
class Mixture:
    """All experts, weighed."""

    weights: Leaf
    """The softmax of the experts' scores."""
    dispatch: Leaf | None
    """The softmax that mixes the tokens for each expert; None where each expert is given every token."""

    @property
    def reason(self) -> str:
        """Why this is left alone."""
        if self.dispatch is not None:
            return (
                f"the experts are given mixtures of all tokens, weighed by `{self.dispatch}`: no token is sent to its "
                "top-k experts, which is what the op does"
            )
        return f"every token goes to every expert, weighed by `{self.weights}`: the op needs the top-k of each token"


def mixture(value: Value) -> Mixture | None:
    """The mixture whose output a fact describes."""
    body = _opened(value.body)
    return _of_sum(body) if body.op == "sum" else _of_terms(body) if body.op == "add" else None


def _opened(term: Term) -> Term:
    """An element as it was computed, casts aside."""
    term = uncast(term)
    while (inner := uncast(expanded(term))) is not term:
        term = inner
    return term


def _of_sum(body: Term) -> Mixture | None:
    variables: list[Term] = []
    while body.op == "sum":
        variable, body = open_sum(body)
        variables.append(variable)
    factors = list(_factors(body))
    weights = [leaf for f in factors if (leaf := softmax(f)) is not None and f.free & frozenset(variables)]
    outputs = [f for f in factors if f.op == "at" and softmax(f) is None]
    if len(factors) != 2 or len(weights) != 1 or len(outputs) != 1:
        return None
    leaf = outputs[0].args[0]
    if isinstance(leaf, Stack):
        networks = [_network(_element(part, outputs[0])) for part in leaf.leaves]
        return _of_networks(weights[0], networks)
    network = _network(outputs[0])
    if network is None or not all(m.free & frozenset(variables) for m in network.matrices):
        return None
    return Mixture(weights[0], network.mixed)


def _element(part: Leaf, whole: Term) -> Term:
    """The element of one of a stack's tensors."""
    return at(part, (), *whole.args[3:])


def _of_terms(body: Term) -> Mixture | None:
    """The sum written out expert by expert, each with its column of the weights."""
    weights: list[tuple[Leaf, Term]] = []
    networks: list[_Network | None] = []
    todo = list(terms_of(body))
    while todo and len(weights) < 512:
        term = _opened(todo.pop())
        if term.op == "add":
            todo += terms_of(term)
            continue
        factors = list(_factors(term))
        columns = [(leaf, f) for f in factors if (leaf := softmax(f)) is not None and f.args[-1].op == "int"]
        if len(factors) != 2 or len(columns) != 1:
            return None
        weights += columns
        networks += [_network(f) for f in factors if f is not columns[0][1]]
    if len({leaf for leaf, _ in weights}) != 1 or len({f for _, f in weights}) != len(weights):
        return None
    return _of_networks(weights[0][0], networks)


def _of_networks(weights: Leaf, networks: list[_Network | None]) -> Mixture | None:
    known = [n for n in networks if n is not None]
    matrices = {m.args[0] for n in known for m in n.matrices}
    if len(known) < 2 or len(known) != len(networks) or len(matrices) != 2 * len(known):
        return None
    return Mixture(weights, known[0].mixed)


def _factors(term: Term) -> Iterator[Term]:
    """The factors of a product, those of computed products included."""
    for part in map(uncast, parts_of(term)):
        opened = _opened(part)
        if opened.op == "mul":
            yield from _factors(opened)
        else:
            yield part


def softmax(term: Term) -> Leaf | None:
    """The tensor that a term is an element of, if it is a softmax, maybe rescaled."""
    leaf = term.args[0] if term.op == "at" and isinstance(term.args[0], Leaf) else None
    current = leaf
    for _ in range(4):
        if current is None or current.made_by not in RESCALED:
            return None
        if current.made_by in ("aten._softmax", "aten.softmax"):
            return leaf
        value = current.inputs[0] if current.inputs else None
        current = value.body.args[0] if isinstance(value, Value) and value.body.op == "at" else None
        current = current if isinstance(current, Leaf) else None
    return None


# -- an expert -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    matrices: tuple[Term, Term]
    """An element of the outer and of the inner projection's matrix."""
    mixed: Leaf | None
    """The softmax that the rows of the inner one are mixed by."""


def _network(term: Term) -> _Network | None:
    """Two projections, the inner one somewhere in what the outer one reads."""
    outer = _projection(term)
    inner = None if outer is None else _inner(outer[1], 12)
    if outer is None or inner is None:
        return None
    rows = _opened(inner[1])
    mixed = [softmax(f) for f in _factors(open_sum(rows)[1])] if rows.op == "sum" else []
    return _Network((outer[0], inner[0]), next((m for m in mixed if m is not None), None))


def _projection(term: Term) -> tuple[Term, Term] | None:
    """A given matrix's element, and what is projected by it; a bias aside."""
    products = [t for t in map(uncast, terms_of(_opened(term))) if t.op == "sum"]
    if len(products) != 1:
        return None
    inner, body = products[0].args
    factors = [uncast(f) for f in parts_of(body)]
    matrices = [f for f in factors if is_given(f) and inner in f.free]
    if len(factors) != 2 or not matrices:
        return None
    matrix = max(matrices, key=_is_weight)  # tokens may be given too
    (rest,) = [f for f in factors if f is not matrix] or [matrix]
    return matrix, rest


def _is_weight(term: Term) -> tuple[bool, int]:
    leaf = term.args[0].leaves[0] if isinstance(term.args[0], Stack) else term.args[0]
    return isinstance(leaf.tensor, torch.nn.Parameter), len(term.args)


def _inner(term: Term, depth: int) -> tuple[Term, Term] | None:
    """The first projection in what is computed pointwise."""
    found = _projection(term)
    if found is not None or depth == 0:
        return found
    opened = _opened(term)
    if opened.op in ("at", "sum"):
        return None
    return next((p for c in children_of(opened) if (p := _inner(c, depth - 1)) is not None), None)
