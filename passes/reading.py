"""How the pass understood one graph, for those who explain it to people. The pass itself reads none of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from mokfx.passes.interpret import Tracker
from mokfx.passes.outcome import Match, Miss
from mokfx.passes.region import Region


@dataclass(frozen=True)
class Reading:
    """One graph, after its layers were rewritten; erased nodes are told apart by identity, their edges are gone."""

    module: GraphModule
    needs: Mapping[Node, set[Node]]
    """What each node of the captured graph needs: its inputs, and the in-place changes that they have had."""
    values: Mapping[Node, Any]
    """What each node computed: fake tensors and numbers."""
    tracker: Tracker
    """Its `said` has the fact of each node as it was when the node had run."""
    layers: tuple[tuple[Region, Match], ...]
    misses: tuple[Miss, ...]


Watch = Callable[[Reading], None]
