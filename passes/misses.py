"""Near misses: for each thing that looks like an MoE layer and was left alone, the line where understanding ended."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Node

from mokfx.passes.interpret import Tracker
from mokfx.passes.outcome import Miss
from mokfx.passes.source import source_of
from mokfx.passes.terms import Term, children_of
from mokfx.passes.value import Value

UNREAD = {
    "_c10d_functional.all_to_all_single": "this all-to-all's splits are not the numbers of rows that routing sends to each rank",
    "aten.native_dropout": "an expert drops values at random, which the op does not do",
    "aten.bernoulli": "an expert draws random numbers, which the op does not do",
    "aten.native_layer_norm": "an expert normalises its values, which is no part of the networks that the op computes",
}
"""What to say of ops that ended understanding, where more can be said than that they have no rule."""


@dataclass(frozen=True)
class Reason:
    node: Node
    text: str
    depth: int = 0


def near_misses(tracker: Tracker, refused: list[Reason], covered: set[Node]) -> list[Miss]:
    """One miss for each group of expert products or all-to-alls that no match covers."""
    misses: list[Miss] = []
    anchors: dict[object, list[Node]] = defaultdict(list)
    for node, owner in tracker.anchors:
        anchors[owner].append(node)
    for owner, nodes in anchors.items():
        if any(node in covered for node in nodes):
            continue
        reason = _best(tracker, owner, refused, nodes)
        source = source_of(reason.node)
        misses.append(Miss(reason.text, source.where, source.code, reason.node.name))
    return list(dict.fromkeys(misses))


def _best(tracker: Tracker, owner: object, refused: list[Reason], nodes: list[Node]) -> Reason:
    """Why the layer of one set of expert ids was left alone."""
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    first, last = order[nodes[0]], order[nodes[-1]]
    about = [r for r in refused if owner is not None or first <= order.get(r.node, -1)]
    if about:
        return about[-1]
    for node, text in tracker.functions:
        if owner in owners(tracker.function_inputs.get(node, ())):
            return Reason(node, f"an autograd.Function on the rows is not part of a layer: {text}")
    judged = [
        Reason(node, refusal.reason, refusal.depth) for node, refusal, whose in tracker.refusals if owner in whose
    ]
    best = max(judged, key=lambda reason: (reason.depth, order[reason.node]), default=None)
    for unread in tracker.unread:
        if owner not in owners(unread.inputs) or not any(_is_rows(value) for value in unread.inputs):
            continue
        if best is None or order[unread.node] < order[best.node]:
            return Reason(unread.node, _unread_text(unread.name))
        break
    if best is not None:
        return best
    if owner is None:
        return Reason(nodes[0], "this all-to-all moves no rows that were sorted by expert")
    return Reason(
        tracker_node(nodes, last, order), "the rows of the experts never come back to their tokens as a weighted sum"
    )


def tracker_node(nodes: list[Node], last: int, order: dict[Node, int]) -> Node:
    return next(node for node in reversed(nodes) if order[node] == last)


def _unread_text(name: str) -> str:
    if name in UNREAD:
        return UNREAD[name]
    short = name.removeprefix("aten.")
    return f"no rule says what `{short}` makes of rows that were routed to experts"


def _is_rows(value: Value) -> bool:
    """Whether a fact is about data on its way through the experts, not about indices or counts."""
    return value.body.depth > 0 or _has_rows(value.body)


def _has_rows(term: Term) -> bool:
    tensor = getattr(term.args[0], "tensor", None) if term.op == "at" else None
    if tensor is not None and tensor.is_floating_point() and term.routed:
        return True
    return any(_has_rows(child) for child in children_of(term))


def owners(values: tuple[Value, ...]) -> set[object]:
    """The expert ids that routed what these facts are about."""
    return {leaf for value in values for leaf in ids_behind(value.body)}


def ids_behind(term: Term) -> set[object]:
    """The integer tensors whose entries decide where the rows of a term are."""
    found: set[object] = set()
    todo: list[Term] = [term]
    seen: set[Term] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "at":
            tensor = getattr(node.args[0], "tensor", None)
            if tensor is not None and not tensor.is_floating_point():
                found.add(node.args[0])
        for arg in node.args:
            body = getattr(arg, "body", None) or getattr(getattr(arg, "keys_sent", None), "body", None)
            if isinstance(body, Term):
                todo.append(body)
        todo.extend(children_of(node))
    return found
