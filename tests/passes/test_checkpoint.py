"""Activation checkpointing: the layer is inside of a body of its own, which is rewritten and trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .models import Layer, inputs, seeded
from .support import assert_same, compiled, run


class Checkpointed(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.layer = Layer()
        self.dense = nn.Linear(8, 8, dtype=torch.float64) if dense else None

    def body(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.dense is None else x + self.layer(self.dense(x).tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def test_the_layer_alone() -> None:
    model = seeded(lambda: Checkpointed(dense=False))
    x = inputs(6)
    with compiled(model) as (function, record):
        got = run(function, model, x)
    assert len(record.calls) == 1
    assert record.calls[0].graph is not record.modules[0].graph  # it stays inside of the checkpoint
    assert_same(got, run(model, model, x))


def test_a_block() -> None:
    model = seeded(lambda: Checkpointed(dense=True))
    x = inputs(6)
    with compiled(model) as (function, record):
        got = run(function, model, x)
    assert len(record.outcome.matches) == 1
    assert_same(got, run(model, model, x))
