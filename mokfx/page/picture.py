"""What a picture of a graph shows: steps, what each means, and which part of an MoE layer it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mokfx.passes.outcome import Miss

STAGES = ("input", "router", "dispatch", "experts", "shared", "combine", "op", "outside")
"""Parts of a picture, in the order in which a token passes them."""


@dataclass(frozen=True)
class Step:
    """One node of a graph, or several that do the same for one expert each."""

    name: str
    """What the graph calls it; of several, the first."""
    op: str
    """What it calls: `linear`, `argsort`."""
    stage: str
    """One of STAGES; in the picture of a near miss "known", "ended" (understanding, here) or "unknown"."""
    shape: str = ""
    """`f32[16, 2]`; "" of what is no tensor."""
    meaning: str = ""
    """The fact about its value, in words."""
    where: str = ""
    """`file.py:line`."""
    code: str = ""
    inputs: tuple[int, ...] = ()
    """Positions, in the picture, of the steps that it needs."""
    weights: tuple[str, ...] = ()
    """Parameters that it reads; they are not drawn."""
    count: int = 1
    """How many nodes it stands for."""
    quiet: bool = False
    """It changes the form of a value and not what it means: drawn small."""
    kept: bool = False
    """The model also uses it elsewhere, so that it stays in the graph."""


@dataclass(frozen=True)
class Drawing:
    """The steps of one picture, each after those that it needs."""

    steps: tuple[Step, ...] = ()
    unseen: int = 0
    """Nodes that are left out: checks on sizes, which nothing uses."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of one layer in the call that was traced; None where a number depends on data."""

    tokens: int | None
    """On this rank."""
    hidden: int
    intermediate: int
    experts: int
    """Of all ranks."""
    top_k: int
    ranks: int
    dtype: str
    """Of x: `bfloat16`."""
    gated: bool
    """Whether an expert has three matrices instead of two."""
    shared: int = 0
    """Width of the shared expert; 0 without one."""
    symbolic: bool = False
    """Whether the graph is compiled for any number of tokens."""


@dataclass(frozen=True)
class LayerPicture:
    """One layer that became `mok.moe`."""

    before: Drawing = Drawing()
    after: Drawing = Drawing()
    sizes: Sizes | None = None
    """None if the layer's sizes are not numbers."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of one captured graph and of the graphs nested in it."""

    layers: tuple[LayerPicture, ...] = ()
    """One for each match, in the same order."""
    misses: Mapping[Miss, Drawing] = field(default_factory=dict)
    """What is around the place where understanding ended."""


def joined(pictures: Iterable[Pictures]) -> Pictures:
    """The pictures of a graph and of those nested in it, together."""
    layers: list[LayerPicture] = []
    misses: dict[Miss, Drawing] = {}
    for part in pictures:
        layers += part.layers
        misses |= part.misses
    return Pictures(tuple(layers), misses)
