"""Reading a graph while Dynamo is still writing it: which node made a size, and what it is known to be."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

SIZED_BY_DATA = {"nonzero", "argwhere", "where"}
ROWS_KEPT = {  # ops that only read, slice or compare the few numbers of a hit list, all cheap to run for real
    *(
        "getitem",
        "item",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "ravel",
        "select",
        "unbind",
        "contiguous",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "floordiv", "mod", "neg", "not_"),
}
LENGTHS = {"size", "sym_size", "sym_sum", "numel", "and_", "or_"}
MOVES = {"to", "cpu", "long", "int", "detach", "clone"}  # keep every number, whatever the device
READS = ROWS_KEPT | LENGTHS | MOVES


def op_name(node: Node) -> str:
    """`nonzero` for x.nonzero(), torch.nonzero(x) and torch.ops.aten.nonzero.default(x)."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def value_of(node: Any) -> Any:
    """The fake tensor or symbolic number that Dynamo recorded for a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def expression_of(value: Any) -> sympy.Basic | None:
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat) else None


def number_node(graph: Graph, expression: sympy.Basic) -> Node | None:
    """The newest node whose value is the symbolic integer `expression`."""
    for node in reversed(graph.nodes):
        value = value_of(node)
        if isinstance(value, torch.SymInt) and value.node.expr == expression:
            return node
    return None


def maker_of(graph: Graph, symbol: sympy.Basic) -> Node | None:
    """The node that made an unbacked symbol: its value, or its result has it as a size, or is a tensor whose
    one number it is (read by an index, say, before there is an `item` node)."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        value = value_of(node)
        for part in value if isinstance(value, tuple | list) else [value]:
            if expression_of(part) == symbol or expression_of(getattr(part, "item_memo", None)) == symbol:
                return node
            if isinstance(part, torch.Tensor) and any(expression_of(size) == symbol for size in part.shape):
                return node
    return None


def hit_list(node: Node) -> Node | None:
    """For `hit.nonzero()`, `torch.where(hit)`, `torch.argwhere(hit)` of a vector: the node of `hit`."""
    if op_name(node) not in SIZED_BY_DATA or len(node.args) != 1 or not isinstance(node.args[0], Node):
        return None
    hit = value_of(node.args[0])
    return node.args[0] if isinstance(hit, torch.Tensor) and hit.dim() == 1 else None


class UnknownValue(Exception):
    """A node's value does not follow from the hit lists alone."""


def known(node: Any, lists: dict[Node, int], *, lengths: bool = False) -> Any:
    """The value of a node if each of `lists` names all experts in order. Raises UnknownValue if that does not
    say it.

    Not from a list's length, unless `lengths`: how many experts were hit is a question whose answer is not
    "all"."""
    if not isinstance(node, Node):
        if isinstance(node, torch.SymInt | torch.SymBool | torch.SymFloat):
            raise UnknownValue
        return (
            type(node)(known(part, lists, lengths=lengths) for part in node)
            if isinstance(node, tuple | list)
            else node
        )
    if node in lists:
        return _all_rows(node, lists[node])
    name = op_name(node)
    if name in MOVES:
        return known(node.args[0], lists, lengths=lengths)
    if node.op not in ("call_function", "call_method") or name not in (
        ROWS_KEPT | LENGTHS if lengths else ROWS_KEPT
    ):
        raise UnknownValue
    arguments = [known(argument, lists, lengths=lengths) for argument in node.args]
    keywords = {key: known(argument, lists, lengths=lengths) for key, argument in node.kwargs.items()}
    if node.op == "call_method":
        return real(partial(getattr(arguments[0], name), **keywords), *arguments[1:])
    assert callable(node.target)
    return real(partial(node.target, **keywords), *arguments)


def real(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function on real tensors, although Dynamo's fake mode may be on."""
    with _disable_current_modes():
        return function(*arguments)


def _all_rows(node: Node, num_experts: int) -> Any:
    rows = real(torch.arange, num_experts)
    return (rows,) if op_name(node) == "where" or node.kwargs.get("as_tuple") else real(rows.unsqueeze, 1)


def plain_indices(gm: GraphModule, lists: dict[Node, int]) -> None:
    """Writes `mask[3]` where the graph has `mask[hit_list[3][0]]`, and erases what that leaves unused, with
    Dynamo's own assertions about the list's length.

    Sound while the marker is in the graph: it asserts that row 3 is expert 3.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], Node):
            if any(isinstance(a, Node) and a in lists for a in node.args[:1]):
                continue
            index = node.args[1]
            parts = index if isinstance(index, tuple) else (index,)
            new = tuple(_plain(part, lists) for part in parts)
            if new != parts:
                node.args = (node.args[0], new if isinstance(index, tuple) else new[0])
    for node in reversed(list(gm.graph.nodes)):
        if (
            op_name(node) == "_assert_scalar"
            and _follows(node.args[0], lists)
            and known(node.args[0], lists, lengths=True)
        ) or (not node.users and node not in lists and op_name(node) in READS and _follows(node, lists)):
            gm.graph.erase_node(node)


def _plain(part: Any, lists: dict[Node, int]) -> Any:
    if not isinstance(part, Node):
        return part
    try:
        value = known(part, lists)
    except UnknownValue:
        return part
    if isinstance(value, torch.Tensor):
        return real(int, value) if value.dim() == 0 and value.dtype is not torch.bool else part
    return value if type(value) is int else part


def _follows(node: Any, lists: dict[Node, int]) -> bool:
    try:
        known(node, lists, lengths=True)
    except UnknownValue:
        return False
    return True


_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in ', re.MULTILINE)


def frames(node: Node) -> list[tuple[str, int]]:
    """(file, line) of the user's calls that led to a node, outermost first."""
    return [(name, int(line)) for name, line in _FRAME.findall(node.meta.get("stack_trace") or "")]


def nested(gm: GraphModule) -> Iterator[GraphModule]:
    """A graph and the graphs in it (checkpointed bodies, autograd.Function bodies)."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))
