"""Slots that a gate drops by its own rule: ids of -1, and a table of the rows of the others."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import inputs, seeded
from .support import assert_same, compiled, run

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 8, 6, 12

FAULTS = {
    "places of a column later": "a place is not that of the slot's expert",
    "more rows marked than an expert has places": "two slots get one row",
    "every expert marked": "experts count that the token did not choose",
    "places in the mask before dropping": "a kept slot may have a place that no row has",
    "rows of the ids before dropping": "dropped slots read what the kept ones wrote",
}


class Layer(nn.Module):
    """Each expert keeps the tokens that want it most, as many as it has places."""

    def __init__(self, top_k: int = 2, fault: str = "") -> None:
        super().__init__()
        self.top_k, self.fault = top_k, fault
        shapes = {"up": (EXPERTS, HIDDEN, INTERMEDIATE), "down": (EXPERTS, INTERMEDIATE, HIDDEN)}
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS, dtype=torch.float64))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.router).softmax(-1)
        weights, ids = scores.topk(self.top_k)
        places = TOKENS * self.top_k // EXPERTS - 2
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
        wanted = torch.zeros_like(scores).scatter(1, ids, weights)
        best = wanted.topk(places + (self.fault == "more rows marked than an expert has places"), dim=0).indices
        kept = torch.zeros_like(chosen).scatter_(0, best, True)
        mask = kept if self.fault == "every expert marked" else chosen & kept
        seen = (chosen if self.fault == "places in the mask before dropping" else mask).cumsum(0) - 1
        if self.fault == "places of a column later":
            seen = seen.roll(1, 1)
        mine = mask.gather(1, ids)
        rest = torch.where(mine, ids, torch.full_like(ids, -1))
        place = seen.gather(1, ids) * mine
        asked = ids if self.fault == "rows of the ids before dropping" else rest
        row = torch.where(asked >= 0, rest * places + place, torch.full_like(rest, EXPERTS * places))
        tokens = torch.arange(TOKENS).unsqueeze(1).expand_as(row)
        source = torch.full((EXPERTS * places + 1,), TOKENS).scatter(0, row.flatten(), tokens.flatten())
        rows = torch.cat([x, x.new_zeros(1, HIDDEN)]).index_select(0, source[:-1]).view(EXPERTS, places, HIDDEN)
        out = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).flatten(0, 1)
        back = torch.cat([out, out.new_zeros(1, HIDDEN)]).index_select(0, row.flatten())
        return (back.view(TOKENS, self.top_k, HIDDEN) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("top_k", [2, 3])
def test_each_expert_keeps_those_that_want_it_most(top_k: int) -> None:
    layer = seeded(lambda: Layer(top_k))
    x = inputs(TOKENS, HIDDEN)
    wanted = run(layer, layer, x)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert [miss.reason for miss in record.outcome.misses] == []
    assert len(record.calls) == 1
    assert_same(got, wanted)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_give_two_slots_one_row_is_left_alone(fault: str) -> None:
    layer = seeded(lambda: Layer(2, fault))
    with compiled(layer) as (function, record), suppress(RuntimeError, IndexError):  # some read beyond the last row
        function(inputs(TOKENS, HIDDEN))
    assert len(record.calls) == 0
    assert record.outcome.misses
