"""Near misses: for each thing that looks like an MoE layer and was left alone, the line where understanding ended."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mokfx.passes.bijections import Exchange
from mokfx.passes.interpret import JOINS, Tracker, Unread
from mokfx.passes.outcome import Miss
from mokfx.passes.owners import is_rows, owners
from mokfx.passes.source import source_of
from mokfx.passes.value import Leaf

UNREAD = {
    "_c10d_functional.all_to_all_single": (
        "this all-to-all's splits are not the numbers of rows that routing sends to each rank"
    ),
    "aten.index_put": "rows are written here at places that do not follow from the ids that sorted them",
    "aten.amax": "the outputs of a token's experts are joined to their largest, not summed",
    "aten.amin": "the outputs of a token's experts are joined to their smallest, not summed",
    "aten.prod": "the outputs of a token's experts are multiplied, not summed",
    "aten.native_dropout": "an expert drops values at random, which the op does not do",
    "aten.bernoulli": "an expert draws random numbers, which the op does not do",
    "aten.native_layer_norm": "an expert normalises its values, which is no part of the networks that the op computes",
}
"""What to say of ops that ended understanding, where more can be said than that they have no rule."""
CUT = "the gradient of the rows is cut here (detach or no_grad), where the op would give one"


@dataclass(frozen=True)
class Reason:
    node: Node
    text: str
    depth: int = 0


def near_misses(tracker: Tracker, refused: list[tuple[Reason, set[object]]], covered: set[Node]) -> list[Miss]:
    """One miss for each group of expert products or all-to-alls that no match covers."""
    misses: list[Miss] = []
    anchors = tracker.anchors.layers()
    for owner, nodes in sorted(anchors.items(), key=lambda item: item[0] is None):
        if any(node in covered for node in nodes):
            continue
        if owner is None and misses:
            continue  # what another miss is about has reached it
        reason = _best(tracker, owner, refused, nodes)
        source = source_of(reason.node)
        misses.append(Miss(reason.text, source.where, source.code, reason.node.name))
    for node, mixed in tracker.mixtures.values():
        source = source_of(node)
        misses.append(Miss(mixed.reason, source.where, source.code, node.name))
    if not misses and not anchors and not covered:
        misses += _lost_before_the_experts(tracker)
    return list(dict.fromkeys(misses))


PRODUCTS = frozenset(("matmul", "mm", "bmm", "baddbmm", "linear", "einsum", "_grouped_mm", "grouped_mm"))


def _lost_before_the_experts(tracker: Tracker) -> list[Miss]:
    """Routed rows that something unread was done to, before they met the weights of any expert."""
    for unread in tracker.unread:
        if any(map(is_rows, unread.inputs)) and _reaches_a_product(unread.node):
            source = source_of(unread.node)
            return [Miss(_unread_text(unread.name), source.where, source.code, unread.node.name)]
    return []


def _reaches_a_product(node: Node) -> bool:
    todo, seen = [node], set()
    while todo:
        user = todo.pop()
        if user in seen:
            continue
        seen.add(user)
        if getattr(user.target, "__name__", str(user.target)) in PRODUCTS:
            return True
        todo.extend(user.users)
        todo.extend(a for a in user.all_input_nodes if user is node and a.op != "placeholder")  # changed in place
    return False


def _best(tracker: Tracker, owner: object, refused: list[tuple[Reason, set[object]]], nodes: list[Node]) -> Reason:
    """Why the layer of one set of expert ids was left alone."""
    if owner in tracker.anchors.takers.first:
        return Reason(owner.node, _chosen(owner))
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    about = [reason for reason, whose in refused if owner in whose]
    if about:
        return about[-1]
    for node, whose in tracker.cuts:
        if owner in whose:
            return Reason(node, CUT)
    for node, text in tracker.functions:
        if owner in owners(tracker.function_inputs.get(node, ())):
            return Reason(node, f"an autograd.Function on the rows is not part of a layer: {text}")
    for unread in tracker.unread:
        ended = _first_of_all(unread) if owner in owners(unread.inputs) else None
        if ended is not None:
            return Reason(unread.node, ended)
    judged = [
        (refusal.depth, order[node], node, refusal) for node, refusal, whose in tracker.refusals if owner in whose
    ]
    best: Reason | None = None
    if judged:
        depth, _, node, refusal = max(judged, key=lambda item: item[:2])
        if "detached(" in refusal.reason:
            return Reason(_blamed(tracker, node, ("aten.detach",), order), CUT)
        best = Reason(_blamed(tracker, node, refusal.blame, order), refusal.reason, depth)
    for unread in tracker.unread:
        if owner not in owners(unread.inputs) or not any(is_rows(value) for value in unread.inputs):
            continue
        if best is None or order[unread.node] < order[node]:
            return Reason(unread.node, _unread_text(unread.name))
        break
    if best is not None:
        return best
    if owner is None:
        return Reason(nodes[0], "this all-to-all moves no rows that were sorted by expert")
    return Reason(nodes[-1], "the rows of the experts never come back to their tokens as a weighted sum")


def _first_of_all(unread: Unread) -> str | None:
    """What an unread op says more of than any sum that it takes part in: another group, or another way to join."""
    left = {b.group for v in unread.inputs for b in v.body.perms if isinstance(b, Exchange)} - {unread.group}
    if unread.group is not None and left:
        return (
            f"rows leave by the all-to-all over group {min(left)!r}, but come back by one over group {unread.group!r}"
        )
    return UNREAD[unread.name] if unread.name in JOINS else None


def _chosen(tokens: Leaf) -> str:
    return (
        f"the experts choose their tokens (`{tokens}`): a token's experts are not the top-k of its own scores, "
        "which is what the op computes"
    )


def _blamed(tracker: Tracker, node: Node, names: tuple[str, ...], order: dict[Node, int]) -> Node:
    """The last node before a refused sum that made one of the blamed calls."""
    before = [n for n, name in tracker.calls if name in names and order.get(n, -1) < order[node]]
    return before[-1] if before else node


def _unread_text(name: str) -> str:
    if name in UNREAD:
        return UNREAD[name]
    short = name.removeprefix("aten.")
    return f"no rule says what `{short}` makes of rows that were routed to experts"
