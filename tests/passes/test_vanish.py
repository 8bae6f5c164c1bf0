"""Every expert on every token, all but the chosen ones masked: weights that are 0, on the input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import inputs, seeded
from .support import assert_same, compiled, run

Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of logits [T, E] and their top-k, weights [T, E]."""
INFINITY = float("inf")


def mask_of(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter(1, ids, 1.0)


SCORES: dict[str, Scores] = {
    "sigmoid of a scatter": lambda s, v, i: torch.full_like(s, -INFINITY).scatter(1, i, v).sigmoid(),
    "in place": lambda s, v, i: torch.full_like(s, -INFINITY).scatter_(1, i, v).float().sigmoid().to(s.dtype),
    "softmax": lambda s, v, i: torch.full_like(s, -INFINITY).scatter(1, i, v).softmax(-1),
    "masked_fill": lambda s, v, i: s.masked_fill(~mask_of(s, i).bool(), -INFINITY).softmax(-1),
    "where": lambda s, v, i: torch.where(mask_of(s, i).bool(), s, -INFINITY).softmax(-1),
    "times a mask": lambda s, v, i: s.softmax(-1) * mask_of(s, i),
    "scattered": lambda s, v, i: torch.zeros_like(s).scatter(1, i, v.softmax(-1)),
}
NOT_ZERO: dict[str, Scores] = {
    "sigmoid of zeros": lambda s, v, i: torch.zeros_like(s).scatter(1, i, v).sigmoid(),
    "another fill": lambda s, v, i: torch.full_like(s, -30.0).scatter(1, i, v).sigmoid(),
    "of plus infinity": lambda s, v, i: torch.full_like(s, INFINITY).scatter(1, i, v).sigmoid(),
    "all of them": lambda s, v, i: s.softmax(-1),
    "all but the chosen": lambda s, v, i: s.masked_fill(mask_of(s, i).bool(), -INFINITY).softmax(-1),
    "of other tokens": lambda s, v, i: torch.full_like(s, -INFINITY).scatter(1, i, v).sigmoid().flip(0),
}


class Dense(nn.Module):
    """Four experts, each run on all tokens."""

    def __init__(self, scores: Scores, top_k: int = 2, network: str = "swiglu") -> None:
        super().__init__()
        self.scores, self.top_k, self.network = scores, top_k, network
        self.router = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.gate, self.up = (nn.Parameter(torch.randn(4, 8, 12, dtype=torch.float64)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 1, 12, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 12, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router
        weights = self.scores(logits, *logits.topk(self.top_k, dim=1)).t().unsqueeze(-1)
        y = (self.hidden(x * weights) @ self.down).sum(0)
        return y + 0.0 * (self.bias.sum() + self.gate.sum())  # every parameter has a gradient

    def hidden(self, rows: Tensor) -> Tensor:
        up = rows @ self.up
        if self.network == "swiglu":
            return F.silu(rows @ self.gate) * up
        if self.network == "gelu":  # its slope at 0 is not 0
            return F.gelu(up)
        return F.gelu(up + self.bias) if self.network == "bias" else torch.exp(up)


def outcome_of(layer: Dense) -> tuple[bool, str]:
    """Whether a layer became the op, with the weight on what; its numbers are eager's in any case."""
    x = inputs(16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert_same(got, run(layer, layer, x))
    matches = record.outcome.matches
    return bool(matches), matches[0].combine if matches else ""


@pytest.mark.parametrize("name", SCORES)
def test_masked_scores(name: str) -> None:
    for top_k in (1, 2):
        matched, combine = outcome_of(seeded(lambda k=top_k: Dense(SCORES[name], k)))
        assert matched and combine.endswith("router weight on the input")


def test_networks_that_are_zero_at_zero() -> None:
    assert outcome_of(seeded(lambda: Dense(SCORES["softmax"], network="gelu")))[0]
    for network in ("bias", "exp"):
        assert not outcome_of(seeded(lambda n=network: Dense(SCORES["softmax"], network=n)))[0]


@pytest.mark.parametrize("name", NOT_ZERO)
def test_scores_that_are_not_zero_elsewhere(name: str) -> None:
    assert not outcome_of(seeded(lambda: Dense(NOT_ZERO[name])))[0]
