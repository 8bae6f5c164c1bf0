"""Layers of experts without a top-k of each token: experts that choose their tokens, and mixtures of all experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, HIDDEN, INNER, EXPERTS, TAKEN = 16, 8, 12, 4, 6
"""Each expert takes 6 of the 16 tokens."""


class Stacked(nn.Module):
    """A router and stacked experts; `mix(self, x)` is the layer."""

    def __init__(self, mix: Callable[[Stacked, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS))
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)) for _ in range(EXPERTS)
        )

    def scores(self, x: Tensor) -> Tensor:
        return F.softmax(x @ self.router, dim=-1)

    def ffn(self, rows: Tensor) -> Tensor:
        """[E, C, H] -> [E, C, H]."""
        return torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


# --- experts choose their tokens ---


def taken_index_add(m: Stacked, x: Tensor) -> Tensor:
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=1)
    out = m.ffn(x[tokens]) * weights.unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, tokens.reshape(-1), out.reshape(-1, HIDDEN))


def taken_scatter_add(m: Stacked, x: Tensor) -> Tensor:
    weights, tokens = m.scores(x).topk(TAKEN, dim=0)  # [C, E]
    flat = tokens.t().reshape(-1, 1).expand(-1, HIDDEN)
    rows = x.gather(0, flat).view(EXPERTS, TAKEN, HIDDEN)
    out = (m.ffn(rows) * weights.t().unsqueeze(-1)).reshape(-1, HIDDEN)
    return torch.zeros_like(x).scatter_add(0, flat, out)


def taken_one_hot(m: Stacked, x: Tensor) -> Tensor:
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=-1)
    picks = F.one_hot(tokens, x.shape[0]).to(x.dtype)
    rows = torch.einsum("ect,th->ech", picks, x)
    h = F.gelu(torch.einsum("ech,ehi->eci", rows, m.gate))
    out = torch.einsum("eci,eih->ech", h, m.down)
    return torch.einsum("ect,ec,ech->th", picks, weights, out)


def taken_sorted(m: Stacked, x: Tensor) -> Tensor:
    scores = torch.sigmoid(x @ m.router).t()
    tokens = scores.argsort(dim=-1, descending=True)[:, :TAKEN]
    weights = scores.gather(1, tokens)
    out = m.ffn(x[tokens]) * weights.unsqueeze(-1)
    y = torch.zeros_like(x)
    y.index_put_((tokens.reshape(-1),), out.reshape(-1, HIDDEN), accumulate=True)
    return y


def taken_one_by_one(m: Stacked, x: Tensor) -> Tensor:
    scores = m.scores(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        weights, tokens = scores[:, e].topk(TAKEN)
        y = y.index_add(0, tokens, expert(x[tokens]) * weights.unsqueeze(-1))
    return y


def taken_in_rows(m: Stacked, x: Tensor) -> Tensor:
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=1)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y[tokens[e]] = y[tokens[e]] + expert(x[tokens[e]]) * weights[e].unsqueeze(-1)
    return y


def taken_of_batches(m: Stacked, x: Tensor) -> Tensor:
    batch = x.view(2, -1, HIDDEN)
    weights, tokens = torch.topk(m.scores(batch).transpose(1, 2), TAKEN // 2, dim=-1)  # [B, E, C]
    rows = batch.gather(1, tokens.reshape(2, -1, 1).expand(-1, -1, HIDDEN)).view(2, EXPERTS, -1, HIDDEN)
    h = F.silu(torch.einsum("bech,ehi->beci", rows, m.gate)) * torch.einsum("bech,ehi->beci", rows, m.up)
    out = torch.einsum("beci,eih->bech", h, m.down) * weights.unsqueeze(-1)
    y = torch.zeros_like(batch)
    y = y.scatter_add(1, tokens.reshape(2, -1, 1).expand(-1, -1, HIDDEN), out.reshape(2, -1, HIDDEN))
    return y.reshape(x.shape)


TAKEN_BY_EXPERTS = (
    taken_index_add, taken_scatter_add, taken_one_hot, taken_sorted, taken_one_by_one, taken_in_rows,
    taken_of_batches,
)  # fmt: skip


# --- every token to every expert ---


def soft_einsum(m: Stacked, x: Tensor) -> Tensor:
    logits = torch.einsum("td,de->te", x, m.router)
    rows = torch.einsum("te,th->eh", logits.softmax(0), x).unsqueeze(1)
    return torch.einsum("te,eh->th", logits.softmax(1), m.ffn(rows).squeeze(1))


def soft_slots(m: Stacked, x: Tensor) -> Tensor:
    """Two slots an expert."""
    logits = x @ torch.cat([m.router, m.router.flip(1)], dim=1)
    dispatch, combine = logits.softmax(0), logits.softmax(-1)
    rows = (dispatch.t() @ x).view(EXPERTS, 2, HIDDEN)
    return combine @ m.ffn(rows).reshape(-1, HIDDEN)


def soft_loop(m: Stacked, x: Tensor) -> Tensor:
    logits = x @ m.router
    rows = logits.softmax(0).t() @ x
    out = torch.stack([expert(rows[e]) for e, expert in enumerate(m.experts)])
    return logits.softmax(1) @ out


def dense_einsum(m: Stacked, x: Tensor) -> Tensor:
    out = m.ffn(x.expand(EXPERTS, -1, -1))
    return torch.einsum("te,eth->th", m.scores(x), out)


def dense_sum(m: Stacked, x: Tensor) -> Tensor:
    out = torch.stack([expert(x) for expert in m.experts], dim=1)
    return (m.scores(x).unsqueeze(-1) * out).sum(dim=1)


def dense_loop(m: Stacked, x: Tensor) -> Tensor:
    scores = m.scores(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + scores[:, e : e + 1] * expert(x)
    return y


def dense_bmm(m: Stacked, x: Tensor) -> Tensor:
    h = F.relu(torch.einsum("th,ehi->tei", x, m.gate))
    out = torch.einsum("tei,eih->teh", h, m.down)
    return torch.bmm(m.scores(x).unsqueeze(1), out).squeeze(1)


TO_ALL_EXPERTS = (soft_einsum, soft_slots, soft_loop, dense_einsum, dense_sum, dense_loop, dense_bmm)
