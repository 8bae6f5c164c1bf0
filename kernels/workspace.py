"""Scratch memory of one call."""

from __future__ import annotations

import torch

from .exchange import Ranks
from .layer import Layer

UNIT, TILE_ROWS, THREADS = 64, 128, 384  # as in layout.cuh


def rows_of(slots: int, experts: int) -> int:
    """The most rows that any routing can pad `slots` slots to: whole units for each expert."""
    return (slots // UNIT + experts) * UNIT


class Buffers:
    """Buffers of one call, cut from one allocation of torch's allocator, which knows streams and graphs."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        ends, total = {}, 0
        for name, size in sizes.items():
            ends[name] = total
            total += -(-size // 256) * 256
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        self.address = {name: self.memory.data_ptr() + at for name, at in ends.items()}


class Workspace(Buffers):
    """The buffers of a forward, and how many rows, chunks and flags they hold."""

    def __init__(
        self,
        tokens: int,
        choices: int,
        width: int,
        layer: Layer,
        blocks: int,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        experts = layer.down.experts
        slots = ranks.count * ranks.areas.tokens * choices if ranks else tokens * choices  # that are scheduled
        self.chunk = -(-slots // (blocks * THREADS)) * THREADS  # slots a block counts: whole rounds of its threads
        self.chunks = -(-slots // self.chunk)
        self.rows = rows_of(slots, experts)
        self.shared_rows = -(-tokens // UNIT) * UNIT if layer.shared else 0
        self.output_rows = 0 if ranks else self.rows  # with ranks, outputs go to their tokens' ranks
        self.flags = slots // UNIT + experts  # of the routed experts' row tiles; the shared expert's come after
        shared_flags = -(-tokens // TILE_ROWS) if layer.shared else 0
        parts = {
            "hidden": self.rows * layer.inner * 2,
            "shared_hidden": self.shared_rows * layer.shared_inner * 2,
            "slots": (self.output_rows + self.shared_rows) * width * 2,
            "row_token": self.rows * 4,
            "row_weight": self.rows * 4,
            "row_place": self.rows * 8 if ranks else 0,
            "slot_row": tokens * choices * 4,
            "shared_scale": tokens * 4,
            "histogram": self.chunks * experts * 4,
            "ready": (self.flags + shared_flags) * 4,
        }
        super().__init__(device, **parts)
