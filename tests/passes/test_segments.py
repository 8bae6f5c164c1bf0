"""Biases spread over rows by `repeat_interleave`, with a segment behind those of the experts for what is left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import inputs, seeded
from .support import assert_same, compiled, run

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 8, 6, 2
ALPHA, LIMIT = 1.702, 7.0


class Layer(nn.Module):
    """Clamped swiglu experts with biases; `left_over` is what the last segment has more than what is left."""

    def __init__(self, left_over: int = 0, product: str = "addcmul") -> None:
        super().__init__()
        self.left_over, self.product = left_over, product
        shapes = {
            "router": (HIDDEN, EXPERTS),
            "first": (EXPERTS, HIDDEN, 2 * INTERMEDIATE),
            "first_bias": (EXPERTS, 2 * INTERMEDIATE),
            "second": (EXPERTS, INTERMEDIATE, HIDDEN),
            "second_bias": (EXPERTS, HIDDEN),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(TOP_K)
        order = ids.flatten().argsort(stable=True)
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0)
        rows = x[order // TOP_K]
        left = (rows.shape[0] + self.left_over - counts.cumsum(0)[-1]).unsqueeze(0)
        segments = torch.cat([counts, left])

        def spread(bias: Tensor) -> Tensor:
            padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
            size = rows.shape[0] + self.left_over
            return padded.repeat_interleave(segments, dim=0, output_size=size)[: rows.shape[0]]

        def through(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            parts = rows.split(counts.tolist())
            return torch.cat([part @ weight[e] for e, part in enumerate(parts)]) + spread(bias)

        h = through(rows, self.first, self.first_bias)
        gate, up = h[:, ::2].clamp(max=LIMIT), h[:, 1::2].clamp(-LIMIT, LIMIT)
        gated = gate * torch.sigmoid(ALPHA * gate)
        hidden = torch.addcmul(gated, gated, up) if self.product == "addcmul" else torch.addcmul(gated, gate, up)
        out = through(hidden, self.second, self.second_bias) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // TOP_K, out)


def traced(layer: nn.Module) -> tuple[Any, Any, Any]:
    x = inputs(10, HIDDEN)
    wanted = run(layer, layer, x)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    return got, wanted, record


def test_nothing_is_left_over() -> None:
    got, wanted, record = traced(seeded(Layer))
    assert [miss.reason for miss in record.outcome.misses] == []
    assert len(record.calls) == 1
    assert_same(got, wanted)


@pytest.mark.parametrize("left_over, product", [(3, "addcmul"), (0, "of other numbers")])
def test_what_is_not_this_layer_is_left_alone(left_over: int, product: str) -> None:
    """Rows left over are no expert's; and `a + b * c` is the gate only where a and b are one number."""
    got, wanted, record = traced(seeded(lambda: Layer(left_over, product)))
    assert len(record.calls) == 0
    assert [miss.reason for miss in record.outcome.misses] != []
    assert_same(got, wanted)
