"""Experts that choose their tokens: products of rows at the top-k of an expert's scores over all tokens.

Such a layer sorts nothing and sends no slot anywhere, so what gives it away are its products: rows of one tensor, read
at positions that were selected among all of its rows, times a matrix of the expert that selected them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mokfx.passes.facts import shape_of
from mokfx.passes.terms import Size, Term, factors_of, quotient, subterms, terms_of, uncast
from mokfx.passes.value import Leaf, Stack

SELECTIONS = frozenset(("aten.topk", "aten.sort", "aten.argsort", "aten.max", "aten.argmax"))


@dataclass(frozen=True)
class Taken:
    """A product of the rows that an expert selected with a matrix."""

    rows: Leaf
    ids: Leaf
    """Which rows were selected."""
    scores: Leaf
    """What they were selected by."""
    matrix: Leaf | Stack
    which: tuple[Term, ...]
    """What is fixed of the position at which `ids` is read: the expert, where each has a product of its own."""
    batched: bool
    """Whether one product is that of all experts."""


def taken(term: Term) -> Taken | None:
    """What a product's term says, if it is one of selected rows with an expert's matrix."""
    summed = next((t for t in map(uncast, terms_of(uncast(term))) if t.op == "sum"), None)
    if summed is None or not summed.looked_up:
        return None
    inner, body = summed.args
    factors = [uncast(f) for f in factors_of(body)]
    rows = [f for f in factors if f.op == "at" and f.looked_up]
    matrices = [f for f in factors if is_given(f) and inner in f.free]
    if len(factors) != 2 or len(rows) != 1 or len(matrices) != 1:
        return None
    (row,), (matrix,) = rows, matrices
    found = [(d, t) for d, i in enumerate(row.args[2:]) for t in subterms(i) if t.op == "at"]
    if len(found) != 1 or not isinstance(row.args[0], Leaf) or not matrix.free - row.free:
        return None
    ((d, chosen),) = found
    ids = chosen.args[0]
    if not _selects_among(ids, shape_of(row.args[0].tensor)[d]):
        return None
    scores = ids.inputs[0].body.args[0] if ids.inputs and ids.inputs[0].body.op == "at" else None
    if not isinstance(scores, Leaf):
        return None
    which = tuple(i for i in chosen.args[2:] if i.op == "int")
    return Taken(row.args[0], ids, scores, matrix.args[0], which, bool(matrix.free & chosen.free))


def is_given(term: Term) -> bool:
    """Whether a term is an element of what the graph is given, as weights are."""
    if term.op != "at" or term.looked_up:
        return False
    leaves = term.args[0].leaves if isinstance(term.args[0], Stack) else (term.args[0],)
    return all(isinstance(leaf, Leaf) and leaf.node.op in ("placeholder", "get_attr") for leaf in leaves)


def _selects_among(ids: object, rows: Size) -> bool:
    """Whether ids are the result of a selection among that many rows, or that many of each of several batches."""
    if not isinstance(ids, Leaf) or ids.made_by not in SELECTIONS or ids.bound is None:
        return False
    return quotient(rows, ids.bound) is not None


class Takers:
    """The expert-choice layers of a graph, by the ids that choose their tokens."""

    def __init__(self) -> None:
        self.first: dict[Leaf, Leaf] = {}
        """Ids -> the first of the ids that were selected by the same scores."""
        self._loops: dict[tuple[Leaf, Leaf], list[Taken]] = {}

    def see(self, term: Term) -> Leaf | None:
        """Look at a product; the ids that stand for the layer, if it shows that experts choose their tokens."""
        found = taken(term)
        if found is None:
            return None
        if not found.batched and not self._is_another(found):
            return None
        return self.first.setdefault(found.ids, found.ids)

    def _is_another(self, found: Taken) -> bool:
        """Whether another expert was seen to select rows of the same tensor by the same scores."""
        others = self._loops.setdefault((found.rows, found.scores), [])
        others.append(found)
        self.first.setdefault(found.ids, others[0].ids)
        mine = (found.ids, found.which)
        return any((o.ids, o.which) != mine and o.matrix is not found.matrix for o in others)
