"""Guards against slots of another rank's experts, in code that one rank runs too: no slot is meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import Layer, inputs, seeded
from .support import assert_same, compiled, run


class Guarded(Layer):
    """Masks rows whose expert is not below E, then clamps the sorted ids in place, for nobody reads them after that."""

    least = 0
    """How far below E a masked expert may be."""

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        weights, chosen = (x @ self.router).softmax(-1).topk(self.top_k, dim=-1)
        expert, order = chosen.reshape(-1).sort(stable=True)
        rows = x[order // self.top_k]
        beyond = (expert >= self.experts - self.least).unsqueeze(-1)
        pick = F.one_hot(expert, self.experts).to(x.dtype)
        expert.clamp_(max=self.experts - 1)
        rows.masked_fill_(beyond, 0.0)
        gate, up = (torch.einsum("sh,se,ehi->si", rows, pick, w) for w in (self.gate, self.up))
        out = torch.einsum("si,se,eih->sh", F.silu(gate) * up, pick, self.down).masked_fill(beyond, 0.0)
        slots = torch.empty_like(out)
        slots[order] = out
        return (slots.view(-1, self.top_k, x.shape[-1]) * weights.unsqueeze(-1)).sum(1)


class MasksTheLast(Guarded):
    least = 1


def test_a_mask_that_is_nowhere_set_is_nothing() -> None:
    layer, x = seeded(Guarded), inputs(6)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert len(record.outcome.matches) == 1, record.outcome.misses
    assert not record.names() & {"clamp_", "masked_fill", "masked_fill_", "einsum", "sort"}
    assert_same(got, run(layer, layer, x))


def test_a_mask_that_hides_an_expert_is_not() -> None:
    layer, x = seeded(MasksTheLast), inputs(6)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert not record.outcome.matches
    assert_same(got, run(layer, layer, x))
