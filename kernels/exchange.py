"""What ranks write into each other's memory during a call, and where; exchange.cuh says when."""

from __future__ import annotations

from dataclasses import dataclass

FLAGS_BYTES = 256
ALIGNMENT = 256


@dataclass(frozen=True)
class Areas:
    """Bytes from the start of each rank's memory. Fixed for all layers: areas of two layers must not overlap.

    For R ranks of up to `tokens` tokens, of `choices` choices and `width` values: ids and weights
    `[R, tokens, choices]`, 4 bytes each; rows `[R, tokens, width]` and outputs `[tokens * choices, width]`, bf16.
    """

    ranks: int
    tokens: int
    choices: int
    width: int

    @property
    def ids(self) -> int:
        """Where ids begin."""
        return FLAGS_BYTES

    @property
    def weights(self) -> int:
        """Where router weights begin."""
        return self.ids + _aligned(4 * self.ranks * self.tokens * self.choices)

    @property
    def rows(self) -> int:
        """Where rows of x begin."""
        return self.weights + self.weights - self.ids

    @property
    def outputs(self) -> int:
        """Where outputs of slots begin."""
        return self.rows + _aligned(2 * self.ranks * self.tokens * self.width)

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.outputs + _aligned(2 * self.tokens * self.choices * self.width)


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the group that shares a layer's experts."""

    rank: int
    memory: tuple[int, ...]
    """The address of every rank's memory, of `areas.bytes` bytes; flags zero before the first call."""
    areas: Areas
    state: int
    """The address of this rank's 16 bytes that outlive a launch, zero before the first."""
    virtual: bool = False
    """The ranks are blocks of one launch."""

    @property
    def count(self) -> int:
        """R."""
        return len(self.memory)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
