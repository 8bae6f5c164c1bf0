"""A small MoE layer and models around it, for tests of what surrounds a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Sorted dispatch, swiglu experts in buckets of T * k rows; `ids` decides the experts if given."""

    def __init__(
        self,
        hidden: int = 8,
        intermediate: int = 12,
        experts: int = 4,
        top_k: int = 2,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Parameter(torch.randn(hidden, experts, dtype=dtype) / hidden**0.5)
        self.gate = nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) / hidden**0.5)
        self.up = nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) / intermediate**0.5)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        tokens, k = x.shape[0], self.top_k
        scores = (x @ self.router).softmax(-1)
        weights, chosen = scores.topk(k, dim=-1)
        if ids is not None:
            chosen, weights = ids, scores.gather(1, ids)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        expert = flat[order]
        counts = F.one_hot(flat, self.experts).sum(0)
        place = torch.arange(tokens * k) - (counts.cumsum(0) - counts)[expert]
        buckets = x.new_zeros(self.experts, tokens * k, x.shape[-1])
        buckets[expert, place] = x[order // k]
        h = F.silu(torch.bmm(buckets, self.gate)) * torch.bmm(buckets, self.up)
        rows = torch.bmm(h, self.down)[expert, place]
        slots = rows[order.argsort()].view(tokens, k, x.shape[-1])
        return (slots * weights.unsqueeze(-1)).sum(1)


def inputs(tokens: int, hidden: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens that want a gradient."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, hidden, generator=generator, dtype=dtype).requires_grad_()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """`make()` with weights that are the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()
