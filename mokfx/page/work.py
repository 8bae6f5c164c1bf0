"""How much one layer has to compute and to move, and the time below which no implementation can be.

Counted for one rank, with routing in balance: each expert gets its share of the slots, and each token's choices fall
on the ranks by chance. Every input is read once and every result written once; what passes between the stages is
not counted, since an implementation may keep it on the chip. So these are least amounts, not estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from mokfx.page.cards import Card
from mokfx.page.picture import Sizes

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
INDEX, WEIGHT = 8, 4
"""Bytes of an expert id (int64) and of a router weight (float32)."""


@dataclass(frozen=True)
class Work:
    """The least amounts of one pass over a layer, for one rank."""

    name: str
    flops: float
    hbm: float
    """Bytes."""
    nvlink: float
    """Bytes sent to other ranks."""


@dataclass(frozen=True)
class Floor:
    """The least time of one pass on a card, in seconds for each of the three resources."""

    compute: float
    hbm: float
    nvlink: float

    @property
    def seconds(self) -> float:
        """The longest of the three: at best they overlap."""
        return max(self.compute, self.hbm, self.nvlink)

    @property
    def bound(self) -> str:
        """What decides."""
        times = {"compute": self.compute, "HBM": self.hbm, "NVLink": self.nvlink}
        return max(times, key=times.__getitem__)


def work_of(sizes: Sizes, tokens: int) -> tuple[Work, Work]:
    """Forward and backward of a layer with `tokens` tokens on this rank.

    Numbers of more than two bytes are counted as bf16, in which a GPU runs a layer that is developed in float32.
    """
    width = min(BYTES.get(sizes.dtype, 2), 2)
    matrices = 3 if sizes.gated else 2
    slots = tokens * sizes.top_k
    flops = 2.0 * matrices * slots * sizes.hidden * sizes.intermediate
    shared = 3.0 * sizes.hidden * sizes.shared
    flops += 2.0 * tokens * shared
    rows = float(tokens * sizes.hidden * width)
    used = experts_used(sizes, tokens)
    weights = (used * matrices * sizes.hidden * sizes.intermediate + shared) * width
    routing = slots * (INDEX + WEIGHT)
    sent, returned = exchanged(sizes, tokens)
    travel = (sent + returned) * sizes.hidden * width
    forward = Work("forward", flops, 2 * rows + weights + routing, travel)
    # Backward reads x, the gradient of y and the weights; it writes the gradients of x, of the weights and of the
    # router weights. Each exchange of the forward has its mirror.
    backward = Work("backward", 2 * flops, 3 * rows + 2 * weights + routing + slots * WEIGHT, travel)
    return forward, backward


def experts_used(sizes: Sizes, tokens: int) -> float:
    """How many of this rank's experts get a token, on average: few tokens do not reach every expert."""
    unused = (1 - sizes.top_k / sizes.experts) ** (tokens * sizes.ranks)
    return sizes.experts / sizes.ranks * (1 - unused)


def exchanged(sizes: Sizes, tokens: int) -> tuple[float, float]:
    """Rows that this rank sends and rows that it sends back, on average.

    A token travels once to each other rank that has one of its experts; each slot's output travels back by itself,
    because the weighted sum has one order whatever the number of ranks.
    """
    others = sizes.ranks - 1
    elsewhere = sizes.experts - sizes.experts // sizes.ranks
    missed = comb(elsewhere, sizes.top_k) / comb(sizes.experts, sizes.top_k)
    return tokens * others * (1 - missed), tokens * sizes.top_k * others / sizes.ranks


def floor_of(work: Work, card: Card) -> Floor:
    """The least time of a pass on a card."""
    return Floor(work.flops / card.flops, work.hbm / card.hbm, work.nvlink / card.nvlink)
