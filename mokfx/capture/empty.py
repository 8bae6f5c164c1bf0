"""The proof, on the graph, that skipped statements do nothing for an expert without rows.

The syntax has left only these ways out of the statements (see effects.py): tensors that are updated, lists
that are concatenated, a value that both branches give. Here each of them is shown to have no elements when
there are no rows."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from mokfx.capture.chosen import counted_of, expert_of, ids_of, one_hot_of, storage_of
from mokfx.capture.graph import expression_of, frames, maker_of, op_name, value_of
from mokfx.capture.hits import hit_list
from mokfx.capture.trace import Assumption

UPDATES = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_", "setitem"}


def doubt_of_rows(graphs: list[Graph], assumption: Assumption) -> str:
    """Why the statements may do something for an expert without rows; "" if they do not."""
    for graph in graphs:
        inside = {n for n in graph.nodes if any(assumption.holds(*at) for at in frames(n))}
        if not inside:
            continue
        made_outside = {
            storage_of(n) for n in graph.nodes if n not in inside and not _written_by(n, inside)
        } - {None}
        outer = [n for n in graph.nodes if n in inside and memory_written(n) & made_outside]
        tracked = [n for n in graph.nodes if n in inside and _is_update(n, assumption)]
        if stray := [n for n in outer if n not in tracked]:
            return f"`{stray[0].name}` changes a tensor from outside"
        for group in _by_line(tracked):
            if doubt := _each_has_no_rows(graph, group, assumption):
                return doubt
        for cat in _concatenations(graph, inside):
            if doubt := _each_has_no_rows(graph, cat, assumption):
                return doubt
    return ""


def writes(node: Node) -> bool:
    """Whether a node changes a tensor, or has another effect."""
    return _in_place(node) or node.is_impure()


def _in_place(node: Node) -> bool:
    name = op_name(node)
    updated = name.startswith("i") and hasattr(torch.Tensor, f"__{name}__")  # iadd, imul, ...
    return updated or name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def memory_written(node: Node) -> set[int | None]:
    """The memory that a node changes: of its first argument, or of any if its schema says that it changes
    some."""
    if _in_place(node):
        return {storage_of(node.args[0])} if node.args else set()
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return {storage_of(argument) for argument in node.all_input_nodes}
    return set()


def _written_by(node: Node, inside: set[Node]) -> bool:
    """Whether a node outside only passes on what was made inside (a view of it, read later)."""
    return bool(node.all_input_nodes) and all(i in inside for i in node.all_input_nodes)


def _is_update(node: Node, assumption: Assumption) -> bool:
    at = frames(node)[-1]
    return any(
        e.lines.holds(*at) and op_name(node) in e.targets for s in assumption.plan.effects for e in s.evidence
    )


def _by_line(nodes: list[Node]) -> Iterator[list[Node]]:
    lines: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        lines.setdefault(frames(node)[-1], []).append(node)
    return iter(lines.values())


def _concatenations(graph: Graph, inside: set[Node]) -> Iterator[list[Node]]:
    """The pieces of each `cat` outside that joins what was made inside."""
    for node in graph.nodes:
        if node not in inside and op_name(node) in ("cat", "concat", "concatenate") and node.args:
            pieces = [p for p in node.args[0] if isinstance(p, Node)]
            if any(p in inside for p in pieces):
                yield pieces if (node.args[1:] or (node.kwargs.get("dim", 0),)) == (0,) else [node]


def _each_has_no_rows(graph: Graph, nodes: list[Node], assumption: Assumption) -> str:
    """Whether the i-th of `nodes`, one for each expert in order, has no rows if the i-th expert has none."""
    once = f"`{nodes[0].name}` does not happen once for each expert"
    if assumption.kind == "branch":
        if len(nodes) != assumption.times:
            return once
        for moment, node in zip(assumption.moments, nodes, strict=True):
            if not any(_is_none(graph, size, moment.size) for size in _sizes(node)):
                return f"`{node.name}` may do something when there are no rows"
        return ""
    experts = [(rows, e) for rows, count in assumption.lists.items() for e in range(count)]
    if len(nodes) != len(experts):
        line = frames(nodes[0])[-1][1]
        experts = [at for at in experts if assumption.skips.get(at, line) >= line]
    if len(nodes) != len(experts):
        return once
    for (rows, e), node in zip(experts, nodes, strict=True):
        if not any(_of_expert(graph, size, rows, e) for size in _sizes(node)):
            return f"`{node.name}` may do something for an expert that was not hit"
    return ""


def _sizes(node: Node) -> set[sympy.Basic]:
    """Factors of the number of elements that an indexed update writes, or that a piece of a list has.

    Any other update, such as a sum with a whole tensor, has none: nothing of it disappears with the rows.
    """
    if op_name(node) in UPDATES:
        parts = [
            p
            for a in (*node.args[1:], *node.kwargs.values())
            for p in (a if isinstance(a, tuple | list) else [a])
        ]
        shapes = [v.shape for p in parts if isinstance(v := value_of(p), torch.Tensor)]
    else:
        value = value_of(node)
        shapes = [value.shape[:1]] if isinstance(value, torch.Tensor) and not _is_sum(node) else []
    return {e for shape in shapes for size in shape if (e := expression_of(size)) is not None}


def _is_none(graph: Graph, size: sympy.Basic, rows: sympy.Basic | None) -> bool:
    """Whether a size is 0 when `rows` is: it is `rows`, or that of a slice [start:start + rows]."""
    if size == rows:
        return True
    maker = maker_of(graph, size) if isinstance(size, sympy.Symbol) else None
    if maker is None or op_name(maker) != "getitem" or not isinstance(maker.args[1], slice):
        return False
    span = maker.args[1]
    start, stop = _number(span.start or 0), _number(span.stop)
    return start is not None and stop is not None and span.step is None and stop - start == rows


def _number(part: object) -> sympy.Basic | None:
    value = value_of(part)
    return sympy.Integer(value) if isinstance(value, int) else expression_of(value)


def _is_sum(node: Node) -> bool:
    return _in_place(node) or op_name(node) == "add"


def _of_expert(graph: Graph, size: sympy.Basic, rows: Node, expert: int) -> bool:
    """Whether a size is the number of tokens of this expert, by the very ids that the hit list `rows` is made
    of."""
    if not isinstance(size, sympy.Symbol) or not symbol_is_type(size, SymT.UNBACKED_INT):
        return False
    ids = counted_of(hit_list(rows))
    maker = maker_of(graph, size)
    if ids is None or maker is None or _rewritten(graph, ids):
        return False
    if op_name(maker) == "getitem" and isinstance(maker.args[1], int):
        maker = maker.all_input_nodes[0]
    selects = maker.args[1] if op_name(maker) == "getitem" else maker.args[0]
    return expert_of(selects) == (ids, expert)


def _rewritten(graph: Graph, ids: Node) -> bool:
    """Whether the ids, a copy, a mask or counts of them are changed in place, so that two readings may
    differ.

    (Counting itself, `counts.scatter_add_(0, ids, ones)`, only makes an expert that was hit more so.)
    """
    read = {
        storage_of(node)
        for node in graph.nodes
        if ids_of(node) is ids
        or (one_hot_of(node) or expert_of(node) or (None,))[0] is ids
        or counted_of(node) is ids
    }
    return any(memory_written(n) & (read - {None}) and counted_of(n) is None for n in graph.nodes)
