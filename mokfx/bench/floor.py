"""The least time that a layer can take, from ceilings measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .measure import time_calls
from .ranks import Ranks
from .shapes import Shape

BYTES = 2  # of a bf16 value


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached: a dense bf16 product in FLOP/s; bytes a second of a copy in a GPU's memory, read and
    written, and leaving a GPU for the others of its group (None with one rank)."""

    products: float
    memory: float
    link: float | None


def measure_ceilings(ranks: Ranks, calls: int = 10, groups: int = 20) -> Ceilings:
    """Measures the ceilings as variants are measured. A collective."""
    on_gpu = ranks.device.type == "cuda"
    side, size = (8192, 2**31) if on_gpu else (256, 2**22)
    square = torch.randn(2, side, side, device=ranks.device, dtype=torch.bfloat16)
    product = time_calls(lambda: square[0] @ square[1], ranks, calls, groups).median
    source, target = (torch.ones(size, device=ranks.device, dtype=torch.uint8) for _ in range(2))
    copy = time_calls(lambda: target.copy_(source), ranks, calls, groups).median
    link = None
    if ranks.size > 1:
        exchange = time_calls(lambda: dist.all_to_all_single(target, source), ranks, calls, groups).median
        link = size * (ranks.size - 1) / ranks.size / exchange * 1e3
    return Ceilings(2.0 * side**3 / product * 1e3, 2.0 * size / copy * 1e3, link)


@dataclass(frozen=True)
class Floor:
    """Milliseconds under which no implementation can be, and what sets them."""

    milliseconds: float
    limit: str


def floor(shape: Shape, ranks: int, ceilings: Ceilings, backward: bool) -> Floor:
    """The largest of three times, each of a resource that does nothing else.

    * products: 6 T H (k I + S), and twice that more for a backward;
    * memory: every input read once and every output written once (a backward: also the weights' gradients);
    * link: a row of x to each rank that a token needs, and a row back of each slot, since slots' outputs are added in
      choice order by the token's rank; twice that with a backward.
    """
    passes = 3 if backward else 1
    weights = 3 * shape.width * (shape.experts // ranks * shape.inner + shape.shared) * BYTES
    rows = shape.tokens * shape.width * BYTES
    times = {
        "products": shape.flops * passes / ceilings.products,
        "memory": ((3 * weights + 5 * rows) if backward else (weights + 2 * rows)) / ceilings.memory,
    }
    if ceilings.link is not None:
        away = (ranks - 1) * (1 - (1 - 1 / ranks) ** shape.choices)  # other ranks that a token's choices fall on
        back = shape.choices * (ranks - 1) / ranks
        times["link"] = rows * (away + back) * (2 if backward else 1) / ceilings.link
    limit = max(times, key=times.__getitem__)
    return Floor(times[limit] * 1e3, limit)
