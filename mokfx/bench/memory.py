"""Whether a layer fits, before anything is allocated."""

from __future__ import annotations

import torch

from .errors import BenchError
from .floor import BYTES
from .ranks import Ranks
from .shapes import Shape


def needed(shape: Shape, ranks: int, backward: bool) -> float:
    """About how many bytes a GPU must have free for the hungriest variant, which is eager, and the check."""
    weights = 3.0 * shape.width * (shape.experts // ranks * shape.inner + shape.shared) * BYTES
    slots = shape.tokens * shape.choices
    # Rows, outputs and unsorted outputs in bf16, those again and weighted in float32; gate, up, its SwiGLU and a half
    # of it. A backward keeps nearly all and makes gradients beside it.
    activations = slots * (shape.width * 14.0 + shape.inner * 8.0) * (2.5 if backward else 1)
    check = ranks * shape.tokens * shape.width * (12.0 if backward else 6.0) + 8 * 3 * 4.0 * shape.width * shape.inner
    copies = weights if backward else 0.0  # a variant that wants gate and up apart
    return weights * (2 if backward else 1) + copies + activations + check


def check_fits(shape: Shape, ranks: Ranks, backward: bool) -> None:
    """Raises BenchError if the ranks cannot share the experts, or the GPU has too little memory free."""
    if shape.experts % ranks.size:
        raise BenchError(f"{shape.name}: {shape.experts} experts cannot be shared evenly by {ranks.size} ranks")
    if ranks.device.type != "cuda":
        return
    need, free = needed(shape, ranks.size, backward), min(ranks.share(torch.cuda.mem_get_info(ranks.device)[0]))
    if need > free:
        raise BenchError(
            f"{shape.name} needs about {need / 2**30:.0f} GiB on each GPU, and {free / 2**30:.0f} GiB are free: take "
            f"more GPUs (torchrun) or fewer tokens ({shape.name.partition('@')[0]}@T)"
        )
