"""Small models for the backend's tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, EXPERTS, TOP_K = 8, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 12, bias=False)
        self.up = nn.Linear(HIDDEN, 12, bias=False)
        self.down = nn.Linear(12, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """One rank; asking for the counts breaks the graph of plain torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, EXPERTS).sum(0).tolist()
        parts = x[order // TOP_K].split(counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return (rows[order.argsort()].view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class TwoMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MoE(), MoE()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


class CumsumMoE(MoE):
    """A near miss: a running sum over the rows that are sorted by expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, EXPERTS).sum(0).tolist()
        parts = x[order // TOP_K].split(counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        rows = torch.cumsum(rows, 0)
        return (rows[order.argsort()].view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class Dense(nn.Module):
    """No MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.network = Expert()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.network(self.norm(x)), 0.5, training=self.training)


def tokens(number: int = 6) -> Tensor:
    return torch.randn(number, HIDDEN, dtype=torch.float64)
