"""Recognise a graph that Dynamo broke in the middle of an MoE layer.

The usual layer asks the device for a number (`counts.tolist()`, `.item()`, `nonzero`), and there plain
`torch.compile` ends the graph: the router lands in one graph and the experts in another, which no rewriting
of either can join. The pass then sees two halves that mean nothing to it, so the cause is told here, with
its remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._dynamo import config
from torch.fx import GraphModule, Node

from mokfx.cache import holds_mok_op, is_mok_op
from mokfx.passes.outcome import Miss
from mokfx.places import place_of_node, was_resumed
from mokfx.report import GraphBreak

_ALL_TO_ALL = "all_to_all_single"
_GROUPED = ("_grouped_mm", "grouped_mm")


def find_broken(gm: GraphModule, ended_by: GraphBreak | None) -> Miss | None:
    """The Miss to report for a graph that holds a part of an MoE layer because the layer did not fit in it.

    Args:
        gm: the graph after the pass.
        ended_by: the graph break after which the graph ends, if one does.
    """
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    routers = [node for node in calls if _name(node) == "topk"]
    if ended_by is not None and (router := _left_over(routers)) is not None:
        chosen, _ = place_of_node(router)
        return Miss(
            reason=f"the graph broke here, after {chosen} chose the experts and before they were combined "
            f"({ended_by.reason.rstrip('.')}); {_remedy()}",
            where=ended_by.where,
            code=ended_by.code,
            node=router.name,
        )
    if routers or not any(was_resumed(node) for node in calls):
        return None
    for node in calls:
        if _name(node) == _ALL_TO_ALL and (splits := _outside_splits(node)):
            where, code = place_of_node(node)
            reason = (
                f"the graph that holds this all-to-all has no router, and its splits are {splits}: "
                f"the graph broke between the two; {_remedy()}"
            )
            return Miss(reason, where, code, node.name)
        if _name(node) in _GROUPED and not holds_mok_op(gm):
            where, code = place_of_node(node)
            reason = (
                "the graph that holds this expert GEMM has no router: the graph broke between the two; "
                f"{_remedy()}"
            )
            return Miss(reason, where, code, node.name)
    return None


def _remedy() -> str:
    if config.capture_scalar_outputs and config.capture_dynamic_output_shape_ops:
        return "Dynamo cannot capture that line even with sizes that depend on data: write it another way"
    return "compile with fullgraph=True or with mokfx.compile(model), which capture sizes that depend on data"


def _left_over(routers: list[Node]) -> Node | None:
    """A router whose choice outlives the graph and is not the input of a `mok.moe` of this graph."""
    for router in routers:
        reached = set(_descendants(router))
        if any(node.op == "output" for node in reached) and not any(is_mok_op(node) for node in reached):
            return router
    return None


def _descendants(node: Node) -> Iterator[Node]:
    seen: set[Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                stack.append(user)
                yield user


def _outside_splits(node: Node) -> str:
    """Of what kind the split sizes of an all-to-all are, if nothing in the graph computes them; else ""."""
    splits = [split for arg in node.args[1:3] for split in _listed(arg)]
    if splits and all(isinstance(split, int) for split in splits):
        return "constants"
    if splits and all(isinstance(split, Node) and split.op == "placeholder" for split in splits):
        return "inputs of the graph"
    return ""


def _listed(argument: Any) -> Iterable[Any]:
    return argument if isinstance(argument, (list, tuple)) else ()


def _name(node: Node) -> str:
    """The bare name of what is called, for functions, methods and ops alike."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).split(".")[1]
    return getattr(node.target, "__name__", "")
