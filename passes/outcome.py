"""What the pass says about a graph: each layer it rewrote, and each near miss that it left alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """One MoE layer that became one `mok.moe` call. Every field is ready to print; sizes may be symbolic."""

    where: str
    """`file.py:line` of the statement that completed the layer's output."""
    code: str
    """The source text of that line ("" if it is not known)."""
    node: str
    """Name of the `mok.moe` node in the rewritten graph."""
    group: str | None
    """Name of the expert-parallel process group; None on one rank."""
    ranks: int
    tokens: str
    hidden: str
    intermediate: str
    num_experts: str
    top_k: str
    router: str
    dispatch: str
    experts: str
    combine: str
    shared: str = ""
    capacity: str = ""
    kept: tuple[str, ...] = ()
    """Values of the region that the model also uses elsewhere; their nodes stay in the graph."""
    erased: int = 0
    """Graph nodes that the call replaced."""


@dataclass(frozen=True)
class Miss:
    """One thing that looks like an MoE layer and was left alone."""

    reason: str
    where: str
    code: str
    node: str


@dataclass(frozen=True)
class Outcome:
    """The result of running the pass over one graph and its nested graphs."""

    matches: tuple[Match, ...] = ()
    misses: tuple[Miss, ...] = ()
    seconds: float = 0.0
    """Wall time of the pass."""
