"""What looks like an MoE layer in a graph, whether or not it is one: the products of its experts, and its exchanges.

Rows that were sorted, picked or exchanged are no layer yet: programs also sort what they pack or attend to. They look
like one where they meet the weights of several experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from mokfx.passes.owners import ids_behind, reads_matrices
from mokfx.passes.rules.table import Call
from mokfx.passes.takers import Takers
from mokfx.passes.terms import Term, subterms
from mokfx.passes.value import Leaf, Value

OPERANDS = {
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten._grouped_mm": ("self", "mat2"),
    "_c10d_functional.all_to_all_single": ("input",),
}
SINGLE = frozenset(("aten.mm", "aten.addmm"))
"""Products with one matrix: those of several experts are several."""


@dataclass(frozen=True)
class _Single:
    rows: Term
    matrix: Term
    shape: tuple[object, ...]

    def is_other_expert(self, other: _Single) -> bool:
        """Whether two products are those of two experts, and not two of one network."""
        mine, its = _leaf(self.matrix), _leaf(other.matrix)
        if self.shape != other.shape or self.rows is other.rows or self.matrix is other.matrix or mine is None:
            return False
        return its not in _leaves(self.rows) and mine not in _leaves(other.rows)


class Anchors:
    """Products of routed rows and all-to-alls of data, by the ids that routed them."""

    def __init__(self) -> None:
        self.takers = Takers()
        self._nodes: dict[object, list[Node]] = defaultdict(list)
        self._single: dict[object, list[_Single]] = defaultdict(list)
        self._sure: set[object] = set()
        """Owners whose rows are known to meet the weights of experts, or to leave the rank."""

    def see(self, call: Call, node: Node, before: Sequence[Value | None], result: object) -> None:
        """Look at a product or an exchange: the facts of its operands, and of what it computes.

        A user function's forward is run more than once; once is enough.
        """
        if call.tracker.inside_function and any(node in nodes for nodes in self._nodes.values()):
            return
        values = [v for v in before if v is not None]
        routed = [v for v in values if v.body.routed or reads_matrices(v.body)]
        for owner in {owner for v in routed for owner in ids_behind(v.body)}:
            self._nodes[owner].append(node)
            single = _single(call, values, routed)
            others = self._single[owner]
            if single is None or any(map(single.is_other_expert, others)):
                if single is not None or _has_weights(call, values, routed):
                    self._sure.add(owner)
            else:
                others.append(single)
        if not routed and values and call.name.endswith("all_to_all_single"):
            self._nodes[None].append(node)
            self._sure.add(None)
        chosen = self.takers.see(result.body) if isinstance(result, Value) else None
        if chosen is not None:
            self._nodes[chosen].append(node)
            self._sure.add(chosen)

    def layers(self) -> Mapping[object, list[Node]]:
        """The nodes of each layer in sight, by its ids; by None, exchanges of rows that nothing routed."""
        found: dict[object, list[Node]] = defaultdict(list)
        for owner, nodes in self._nodes.items():
            if owner in self._sure:
                found[self.takers.first.get(owner, owner)] += nodes  # type: ignore[call-overload]
        return found


def operands(call: Call) -> list[torch.Tensor]:
    """The floating operands of a call that may be an anchor."""
    tensors = [call[name] for name in OPERANDS.get(call.name, ())]
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _single(call: Call, values: Sequence[Value], routed: Sequence[Value]) -> _Single | None:
    """A product of rows with one matrix."""
    others = [v for v in values if v not in routed]
    if call.name not in SINGLE or len(others) != 1 or len(routed) != 1:
        return None
    shape = tuple(str(call[OPERANDS[call.name][1]].shape))
    return _Single(routed[0].body, others[0].body, shape)


def _has_weights(call: Call, values: Sequence[Value], routed: Sequence[Value]) -> bool:
    """Whether an exchange, a grouped product, or a batch in which rows meet what is not routed, or picked matrices."""
    if call.name not in OPERANDS or call.name.endswith("all_to_all_single") or call.name == "aten._grouped_mm":
        return True
    others = [v for v in values if v not in routed]
    return any(reads_matrices(v.body) for v in routed) or any(not _from_rows(v.body, 6) for v in others)


def _from_rows(term: Term, depth: int) -> bool:
    """Whether a tensor was computed from routed rows by ops that no rule reads, as attention's weights are."""
    leaf = _leaf(term)
    if not isinstance(leaf, Leaf) or depth == 0:
        return False
    inputs = [v.body for v in leaf.inputs if isinstance(v, Value)]
    return any(body.routed or _from_rows(body, depth - 1) for body in inputs)


def _leaves(term: Term) -> set[object]:
    return {t.args[0] for t in subterms(term) if t.op == "at"}


def _leaf(term: Term) -> object:
    return next(iter(_leaves(term)), None)
