"""A counter of how many tokens each expert got, changed without gradients: no cut of any row's gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import inputs
from .support import compiled


class Counting(nn.Module):
    """Experts that compute what the pass has no rule for, and a buffer of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 8, 8))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(2)
        counts = F.one_hot(ids.flatten(), 4).sum(0)
        with torch.no_grad():
            self.seen.add_(counts)
        order = ids.flatten().argsort(stable=True)
        parts = x[order // 2].split(counts.tolist())
        out = torch.cat([torch.erfinv(part @ self.weight[e]) @ self.weight[e] for e, part in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, order // 2, out * weights.flatten()[order].unsqueeze(-1))


def test_the_reason_is_not_the_counter() -> None:
    layer = Counting()
    with compiled(layer) as (function, record):
        function(inputs(10, dtype=torch.float32))
    (miss,) = record.outcome.misses
    assert miss.reason == "no rule says what `erfinv` makes of rows that were routed to experts"
    assert int(layer.seen.sum()) == 20
