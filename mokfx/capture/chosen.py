"""Which expert's tokens a node of a graph is about: enough to know that an expert that was not hit has no
rows.

Followed are the ways in which eager MoE code asks "which tokens chose expert e" of one tensor of expert ids,
whatever its shape: `ids == e`, a slice of its one-hot mask, and the counts of it by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mokfx.capture.graph import op_name, value_of

RESHAPED = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "ravel", "t", "transpose", "permute"}
SAME = {"to", "long", "int", "bool", "contiguous", "detach", "clone", "cpu", "type", "float"}
POSITIVE = {"gt", "greater", "ne", "not_equal"}
REDUCED = {"sum", "any", "count_nonzero", "amax"}


def ids_of(node: Any) -> Node:
    """The tensor of expert ids, without what only changes its shape or its integer type."""
    while isinstance(node, Node) and op_name(node) in (RESHAPED | SAME) - {"bool"}:
        node = node.args[0]
    return node


def one_hot_of(node: Any) -> tuple[Node, int] | None:
    """(ids, the axis of experts) if a node is a one-hot mask of expert ids."""
    if not isinstance(node, Node):
        return None
    name = op_name(node)
    if name == "one_hot":
        return ids_of(node.args[0]), value_of(node).dim() - 1
    inner = one_hot_of(node.args[0]) if node.args else None
    if inner is None:
        return None
    ids, axis = inner
    if name in SAME:
        return ids, axis
    dims = value_of(node).dim()
    if name == "permute":
        order = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        return ids, [d % dims for d in order].index(axis)
    if name == "transpose" and len(node.args) == 3:
        a, b = (d % dims for d in node.args[1:])
        return ids, {a: b, b: a}.get(axis, axis)
    if (
        name == "getitem"
        and axis == 0
        and isinstance(node.args[1], slice)
        and node.args[1].start in (None, 0)
    ):
        return (ids, 0) if node.args[1].step in (None, 1) else None
    return None


def counted_of(node: Any) -> Node | None:
    """The ids if a node [E] is nonzero exactly where an expert was chosen: counts, or a test that they are
    positive."""
    if not isinstance(node, Node) or not node.args:
        return None
    name = op_name(node)
    if name in POSITIVE and node.args[1:] == (0,):
        return counted_of(node.args[0])
    if name in SAME:
        return counted_of(node.args[0])
    if name == "getitem" and isinstance(node.args[1], slice) and node.args[1].start in (None, 0):
        return counted_of(node.args[0]) if node.args[1].step in (None, 1) else None
    if name in REDUCED and (mask := one_hot_of(node.args[0])) is not None:
        ids, axis = mask
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        rank = value_of(node.args[0]).dim()
        reduced = {
            d % rank for d in (dims if isinstance(dims, tuple | list) else [dims]) if isinstance(d, int)
        }
        return ids if reduced == set(range(rank)) - {axis} and not node.kwargs.get("keepdim") else None
    if name == "bincount" and len(node.args) == 1 and set(node.kwargs) <= {"minlength"}:
        return ids_of(node.args[0])
    if name in ("scatter_add", "scatter_add_") and len(node.args) == 4 and node.args[1] == 0:
        into, source = node.args[0], node.args[3]
        zeros = isinstance(into, Node) and op_name(into) in ("zeros", "new_zeros")
        ones = isinstance(source, Node) and op_name(source) in ("ones", "ones_like", "new_ones")
        return ids_of(node.args[2]) if zeros and ones else None
    return None


def below(ids: Node) -> int | None:
    """What all expert ids are below, where they are the positions that a `topk` or an `argmax` found."""
    node: Any = ids_of(ids)
    dim: Any = None
    if op_name(node) == "getitem" and node.args[1] == 1 and op_name(node.args[0]) == "topk":
        node = node.args[0]
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    elif op_name(node) == "argmax":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    size = value_of(node.args[0]).shape[dim] if isinstance(dim, int) else None
    return size if isinstance(size, int) else None


def expert_of(node: Any) -> tuple[Node, int] | None:
    """(ids, e) if a node is nonzero only at tokens or slots whose id is e: `ids == e`, `mask[e]`, reshaped or
    reduced."""
    if not isinstance(node, Node) or not node.args:
        return None
    name = op_name(node)
    if name == "eq" and type(node.args[1]) is int:
        return ids_of(node.args[0]), node.args[1]
    if name == "getitem" and (mask := one_hot_of(node.args[0])) is not None and mask[1] == 0:
        index = node.args[1]
        if type(index) is int and index >= 0:
            return mask[0], index
        if isinstance(index, slice) and type(index.start) is int and index.stop == index.start + 1:
            return mask[0], index.start
        return None
    if name in RESHAPED | SAME | REDUCED or (name in POSITIVE and node.args[1:] == (0,)):
        return expert_of(node.args[0])
    return None


def storage_of(node: Any) -> int | None:
    """Which memory a node's tensor is in: the same number for views of each other."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
