"""Keep Inductor's caches on and never stale.

Inductor keys its cache on the graph, and knows an op by its name alone: the Python and CUDA behind
`mok.moe` could change and an old compiled graph, with the old backward traced into it, would still be
served. So whatever decides the op's numbers is added to the key, as the uuid of a graph pass that does
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

HOOK = "joint_custom_post_pass"


class Salt(CustomGraphPass):
    """The user's own passes at this hook, followed by nothing; its uuid carries `salt`.

    Inductor takes a list of passes here only since torch 2.13, so the chain is one pass.
    """

    def __init__(self, salt: str, before: tuple[Any, ...] = ()) -> None:
        self.salt = salt
        self.before = before

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)

    def uuid(self) -> Any:
        """None, which switches caching off, when a pass of the user has no uuid: as Inductor itself does."""
        identities = [
            graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None
            for graph_pass in self.before
        ]
        return None if None in identities else (*identities, self.salt)


def salted(patches: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """`patches` of Inductor's config with `salt` added to its cache key, after any pass of the user."""
    present = patches.get(HOOK, getattr(torch._inductor.config, HOOK))
    if present is None:
        before: tuple[Any, ...] = ()
    elif isinstance(present, (list, tuple)):
        before = tuple(present)
    else:
        before = (present,)
    return {**patches, HOOK: Salt(salt, before)}


def holds_mok_op(gm: GraphModule) -> bool:
    """Whether the graph, or one nested in it, calls `mok.moe` or what it runs as."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(is_mok_op(node) for graph in graphs for node in graph.nodes)


def is_mok_op(node: Node) -> bool:
    """Whether `node` calls `mok.moe` or what it runs as."""
    if isinstance(node.target, torch._ops.OpOverload):
        name: str = node.target._schema.name
    elif isinstance(node.target, torch._ops.OpOverloadPacket):
        name = node.target._qualified_op_name
    else:
        return False
    return name in ("mok::moe", "mok::moe_forward", "mok::moe_backward")
