"""Words for a match and for near misses."""

from __future__ import annotations

from torch.fx import Node

from mokfx.passes.interpret import Found, Tracker
from mokfx.passes.outcome import Match, Miss
from mokfx.passes.region import Region
from mokfx.passes.source import source_of


def describe_match(region: Region, node: Node, tracker: Tracker) -> Match:
    layer = region.found.layer
    source = source_of(region.found.node)
    x = layer.x.leaves[0].tensor
    tokens = "*".join(str(s) for s in x.shape[:-1])
    return Match(
        where=source.where,
        code=source.code,
        node=node.name,
        group=layer.group,
        ranks=layer.ranks,
        tokens=tokens,
        hidden=str(layer.hidden),
        intermediate=str(layer.intermediate),
        num_experts=str(layer.num_experts),
        top_k=str(layer.top_k),
        router="",
        dispatch="",
        experts=layer.network.activation,
        combine="",
        shared="" if layer.shared is None else layer.shared.activation,
        capacity="" if layer.capacity is None else str(layer.capacity.limit),
        kept=tuple(n.name for n in region.kept),
        erased=len(region.erased),
    )


def near_misses(tracker: Tracker, refused: list[Miss], matched: list[Found], covered: set[Node]) -> list[Miss]:
    return list(refused)
