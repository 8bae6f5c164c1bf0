"""Small layers of every kind that the benchmark times."""

from __future__ import annotations

from dataclasses import replace

import torch

from mokfx.bench.layer import Layer, make
from mokfx.bench.ranks import Ranks
from mokfx.bench.shapes import Shape

ALONE = Ranks(torch.device("cpu"))
SMALL = Shape("small", 64, 48, 8, 2, 40)
SHAPES = {
    "plain": SMALL,
    "shared": replace(SMALL, shared=32),
    "gpt-oss": replace(SMALL, interleaved=True, clamp=(1.702, 7.0), biased=True, in_out=True),
    "busy": replace(SMALL, experts=2, choices=1),
}
CLAMPED = replace(SHAPES["gpt-oss"], clamp=(1.702, 0.7))
"""Half of its values are clamped. For exact products only: bf16 rounds some of them to the limit's other side."""


def small(kind: str = "plain", seed: int = 0, backward: bool = False) -> Layer:
    layer = make(CLAMPED if kind == "clamped" else SHAPES[kind], ALONE, seed)
    layer.require_gradients(backward)
    return layer
