"""The list of the experts that were hit: what its rows are if all experts are, and numbers in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from mokfx.capture.graph import op_name, value_of

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
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}


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


def plain_numbers(gm: GraphModule, lists: dict[Node, int]) -> None:
    """Writes `mask[3]` and `ids == 3` where the graph computes the 3 from a row of a hit list (`mask[3:4]`
    for a row of shape [1]), and erases what that leaves unused, with Dynamo's own assertions about the list's
    length.

    Sound while the marker is in the graph: it asserts that row 3 is expert 3.
    """
    for node in list(gm.graph.nodes):
        if (
            node.op not in ("call_function", "call_method")
            or len(node.args) < 2
            or number_of(node, lists) is not None
        ):
            continue
        if node.target is operator.getitem and node.args[0] not in lists:
            index = node.args[1]
            parts = index if isinstance(index, tuple) else (index,)
            new = tuple(_as_index(part, lists, node, alone=len(parts) == 1) for part in parts)
            node.args = (node.args[0], new if isinstance(index, tuple) else new[0])
        elif op_name(node) in COMPARISONS:
            _compare_with_number(node, lists)
    for node in reversed(list(gm.graph.nodes)):
        if op_name(node) == "_assert_scalar":
            if _value(node.args[0], lists, lengths=True) is True:
                gm.graph.erase_node(node)
        elif node.users or node in lists or op_name(node) not in READS:
            continue
        elif _value(node, lists, lengths=True) is not None:
            gm.graph.erase_node(node)


def _compare_with_number(node: Node, lists: dict[Node, int]) -> None:
    left, right = node.args[:2]
    number = number_of(right, lists)
    if number is not None and _dim(left) >= _dim(right):
        node.args = (left, number)
        return
    number = number_of(left, lists)
    if number is not None and op_name(node) in ("eq", "ne") and _dim(right) >= _dim(left):
        node.args = (right, number)


def _as_index(part: Any, lists: dict[Node, int], node: Node, *, alone: bool) -> Any:
    number = number_of(part, lists) if isinstance(part, Node) else None
    if number is None or _dim(part) > 1:
        return part
    if _dim(part) == 0:
        return number
    in_place = any(op_name(user).endswith("_") or op_name(user) == "setitem" for user in node.users)
    return part if in_place or not alone else slice(number, number + 1)


def number_of(node: Any, lists: dict[Node, int]) -> int | None:
    """The one integer that a node is worth if each of `lists` names all experts in order; None if it is not
    that."""
    value = _value(node, lists) if isinstance(node, Node) else None
    if isinstance(value, torch.Tensor):
        return real(int, value) if value.numel() == 1 and value.dtype is not torch.bool else None
    return value if type(value) is int else None


def _dim(node: Any) -> int:
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _value(node: Any, lists: dict[Node, int], *, lengths: bool = False) -> Any:
    """`known`, or None."""
    try:
        return known(node, lists, lengths=lengths)
    except UnknownValue:
        return None
