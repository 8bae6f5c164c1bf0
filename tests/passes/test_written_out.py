"""Activations that a program writes out: one that is a known function is recognised, one that looks like it is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import inputs, seeded
from .support import assert_same, compiled, run

ROOT = math.sqrt(2.0)


class Layer(nn.Module):
    """Four two-layer experts with a bias, of which each token goes through two."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.router = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(4, 8, 12, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(4, 12, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 12, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        counts = F.one_hot(ids.flatten(), 4).sum(0).tolist()
        parts = enumerate(x[order // 2].split(counts))
        rows = torch.cat([self.activation(p @ self.up[e] + self.bias[e]) @ self.down[e] for e, p in parts])
        return (rows[order.argsort()].view(-1, 2, 8) * weights.unsqueeze(-1)).sum(1)


GELU = {
    "as in the paper": lambda h: 0.5 * h * (1.0 + torch.erf(h / ROOT)),
    "half at the end": lambda h: h * (torch.erf(h * ROOT / 2) + 1) / 2,
}
OTHERS = {
    "without the root": lambda h: 0.5 * h * (1.0 + torch.erf(h)),
    "without the half": lambda h: h * (1.0 + torch.erf(h / ROOT)),
    "a root of few digits": lambda h: 0.5 * h * (1.0 + torch.erf(h / 1.41421)),
    "of the negative": lambda h: 0.5 * h * (1.0 + torch.erf(-h / ROOT)),
    "of another number": lambda h: 0.5 * h * (1.0 + torch.erf(h.detach() / ROOT)),
    "less one": lambda h: 0.5 * h * (torch.erf(h / ROOT) - 1.0),
}


@pytest.mark.parametrize("activation", GELU.values(), ids=GELU)
def test_gelu(activation: Callable[[Tensor], Tensor]) -> None:
    layer, x = seeded(lambda: Layer(activation)), inputs(16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    (match,) = record.outcome.matches
    assert match.experts == "gelu, a product for each expert, biases"
    assert_same(got, run(layer, layer, x))


@pytest.mark.parametrize("activation", OTHERS.values(), ids=OTHERS)
def test_what_is_not_gelu_is_left_alone(activation: Callable[[Tensor], Tensor]) -> None:
    layer, x = seeded(lambda: Layer(activation)), inputs(16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    (miss,) = record.outcome.misses
    assert "erf" in miss.code or "erf" in miss.reason
    assert_same(got, run(layer, layer, x))


def test_each_factor_is_taken_once() -> None:
    """`h gelu(h)` is a GeGLU whose gate and up are the same."""
    layer, x = seeded(lambda: Layer(lambda h: h * GELU["as in the paper"](h))), inputs(16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    (match,) = record.outcome.matches
    assert match.experts.startswith("geglu")
    assert_same(got, run(layer, layer, x))
