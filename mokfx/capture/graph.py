"""Reading a graph while Dynamo is still writing it: which node made a size, and what it is known to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node


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


_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in ', re.MULTILINE)


def frames(node: Node) -> list[tuple[str, int]]:
    """(file, line) of the user's calls that led to a node, outermost first."""
    return [(name, int(line)) for name, line in _FRAME.findall(node.meta.get("stack_trace") or "")]


def nested(gm: GraphModule) -> Iterator[GraphModule]:
    """A graph and the graphs in it (checkpointed bodies, autograd.Function bodies)."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))
