"""The proof that a graph captured under assumptions means what the model means, or another attempt without
them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mokfx.capture.empty import doubt_of_rows, writes
from mokfx.capture.graph import expression_of, frames, nested, op_name, value_of
from mokfx.capture.hits import hit_list, number_of, plain_numbers
from mokfx.capture.markers import MARKERS
from mokfx.capture.session import active
from mokfx.capture.trace import Assumption, Moment, Trace
from mokfx.capture.unproven import Unproven
from mokfx.passes.outcome import Miss


@contextlib.contextmanager
def proving(gm: GraphModule) -> Iterator[list[Miss]]:
    """Goes around the pass in a backend: `with proving(gm) as misses: misses += rewrite(gm).misses`.

    Does nothing outside `substitutions`. Otherwise, before the pass: proves that what an empty expert skips
    does nothing without rows, then takes the markers out, so that the pass sees none, and writes the experts'
    numbers into the graph. After it: checks that what is skipped became part of a rewritten layer. (The graph
    is right without that too, but an expert without tokens would have gradients of 0 where eager code leaves
    None.)

    It gives a list for what the pass left alone; the first one explains a failure of the second part.
    Raises Unproven if a check fails; the session then holds a Miss with the reason.
    """
    misses: list[Miss] = []
    now = active()
    if now is None or now[1].closed:
        yield misses
        return
    session, trace, translator = now
    trace.closed = True

    def settle(failures: list[tuple[Assumption, str, str]]) -> None:
        for assumption, reason, node in failures:
            reason = f"{assumption.subject} was not captured: {reason}"
            session.refuse(assumption.site, assumption.kind, reason, node)
        if failures:
            trace.clear()
            raise Unproven([m for m in session.misses if m.where in {a.site.where for a, _, _ in failures}])

    for graph in nested(gm):
        plain_numbers(graph, {node: n for node, n in trace.hit_lists.items() if node.graph is graph.graph})
        _speak_clearly(graph, trace)
    settle(
        [(a, reason, "") for a in trace.assumptions.values() if (reason := _doubt(gm, trace, a, translator))]
    )
    settle([failure for graph in nested(gm) for failure in _take_out(graph, trace)])
    yield misses
    settle(_left_over(gm, trace, misses))
    trace.clear()


# Before the pass.


def _doubt(gm: GraphModule, trace: Trace, assumption: Assumption, translator: Any) -> str:
    """Why skipping the statements may change something besides tensors ("" if it does not)."""
    while translator is not None:
        if assumption.holds(translator.f_code.co_filename, translator.lineno):
            return "the graph ends inside the statements that depend on it"
        translator = translator.parent
    markers = [n for graph in nested(gm) for n in graph.graph.nodes if _marks(n, assumption)]
    if len(markers) != len(assumption.moments):
        return "its marker was lost"
    nodes = [(node, at) for graph in nested(gm) for node in graph.graph.nodes if (at := frames(node))]
    for evidence in (e for effects in assumption.plan.effects for e in effects.evidence):
        updates = [
            _keeps(n) for n, at in nodes if evidence.lines.holds(*at[-1]) and op_name(n) in evidence.targets
        ]
        if len(updates) < assumption.times - len(assumption.skips) or not all(updates):
            changed = f"line {evidence.lines.first}: `{evidence.what}` is changed there"
            return f"{changed}, and it is not a tensor that keeps its shape and dtype"
    for graph in nested(gm):
        for node in graph.graph.nodes:
            if (
                node in trace.hit_lists
                and sum(hit_list(user) is not None for user in node.args[0].users) != 1
            ):
                return "the list is made twice, so its length may be used elsewhere"
            if writes(node) and node.args and number_of(node.args[0], trace.hit_lists) is not None:
                return f"`{node.name}` changes a row of the list"
    for moment in assumption.moments:
        if doubt := _other_side(assumption, moment):
            return doubt
    return _changed_objects(assumption) or doubt_of_rows([g.graph for g in nested(gm)], assumption)


def _marks(node: Node, assumption: Assumption) -> bool:
    return node.target in MARKERS and node.args[-1] == assumption.site.where


def _keeps(node: Node) -> bool:
    """Whether a node updates a tensor and leaves its shape and dtype as they were."""
    old, new = value_of(node.args[0]) if node.args else None, value_of(node)
    if not isinstance(old, torch.Tensor):
        return False
    return not isinstance(new, torch.Tensor) or (new.dtype == old.dtype and new.shape == old.shape)


def _other_side(assumption: Assumption, moment: Moment) -> str:
    """Why the value that the empty branch gives may differ from the value of the branch that was captured."""
    plan = assumption.plan
    if not plan.result:
        return ""
    local = moment.translator.symbolic_locals
    variable = moment.translator.symbolic_result if plan.result == "return" else local.get(plan.result)
    try:
        value = value_of(variable.as_proxy().node)
    except (AttributeError, NotImplementedError):
        value = None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return "the value for rows is not one tensor"
    if expression_of(value.shape[0]) != moment.size:
        return "the value for rows does not have these rows"
    if any(isinstance(size, torch.SymInt) and size.node.expr.has(moment.size) for size in value.shape[1:]):
        return "the value's other sizes depend on the number of rows"
    like = moment.like
    if like is None:
        return ""
    mine = (like.dtype, like.device, tuple(like.shape[1:]))
    other = (value.dtype, value.device, tuple(value.shape[1:]))
    if expression_of(like.shape[0]) != moment.size or mine != other:
        return f"without rows the value is like `{plan.same_as}`, which differs in dtype, device or shape"
    return ""


def _changed_objects(assumption: Assumption) -> str:
    """Why a Python object may tell whether the statements ran (also one that a function called there
    changes)."""
    old = {id(variable) for variable in assumption.old}
    effects = assumption.moments[0].translator.output.side_effects
    stacks_of = getattr(effects, "mutation_user_stacks", {})
    if not stacks_of and any(
        "Existing" in type(v.mutation_type).__name__ for v in effects._get_modified_vars()
    ):
        return "Python objects are changed somewhere in the graph, and Dynamo does not say where"
    for variable, stacks in stacks_of.items():
        if "New" in type(variable.mutation_type).__name__ and id(variable) not in old:
            continue
        for stack in stacks:
            inside = [assumption.holds(frame.filename, frame.lineno or 0) for frame in stack]
            if any(inside[:-1]):  # a statement of the function itself was judged by its syntax
                return f"`{stack[-1].line}` changes an object"
    return ""


def _speak_clearly(gm: GraphModule, trace: Trace) -> None:
    """Gives the assertions about a bincount's length a message that says what happened."""
    for node in gm.graph.nodes:
        if op_name(node) == "_assert_scalar" and len(node.args) == 2 and isinstance(node.args[1], str):
            for symbol, message in trace.lengths.items():
                if f" {symbol} " in f" {node.args[1]} ".replace("(", " ").replace(",", " "):
                    node.args = (node.args[0], message)


def _take_out(gm: GraphModule, trace: Trace) -> list[tuple[Assumption, str, str]]:
    """Erases the markers, and the lists of hit experts, which have no use without them; the lists that have
    one."""
    mine = {node for node in trace.hit_lists if node.graph is gm.graph}
    parts = {user for node in mine for user in node.users if op_name(user) == "getitem"}  # where(hit)[0]
    for node in reversed(list(gm.graph.nodes)):
        if node.target in MARKERS or (node in mine | parts and not node.users):
            gm.graph.erase_node(node)
            mine.discard(node)
    return [
        (assumption, f"`{next(iter(node.users)).name}` uses its list for something else", node.name)
        for assumption in trace.assumptions.values()
        for node in mine & set(assumption.lists)
    ]


# After the pass.


def _left_over(gm: GraphModule, trace: Trace, misses: list[Miss]) -> list[tuple[Assumption, str, str]]:
    left: list[tuple[Assumption, str, str]] = []
    for graph in nested(gm):
        feeds = _feeding_layers(graph)
        layers = sum(_is_layer(node) for node in graph.graph.nodes)
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or _is_layer(node) or node in feeds:
                continue
            for assumption in trace.assumptions.values():
                if any(assumption.holds(*at) for at in frames(node)):
                    reason = f"`{node.name}` depends on it and is not part of a rewritten MoE layer"
                    if not layers:
                        reason = "no MoE layer was rewritten around it"
                    if misses:
                        reason += f" ({misses[0].where}: {misses[0].reason})"
                    left.append((assumption, reason, node.name))
    return left


def _is_layer(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in (
        "mok::moe",
        "mok::moe_backward",
    )


def _feeding_layers(gm: GraphModule) -> set[Node]:
    """Nodes that only make the arguments of rewritten layers (views of weights), or nothing at all."""
    found: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        pure = node.op in ("get_attr", "call_function", "call_method") and not writes(node)
        if pure and all(user in found or _is_layer(user) for user in node.users):
            found.add(node)
    return found
