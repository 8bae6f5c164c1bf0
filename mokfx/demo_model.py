"""The model of the demo: one transformer block with an MoE layer, written the way people write it.

Nothing in this file knows of mokfx.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd


class Attention(nn.Module):
    """Causal self-attention on [B, S, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Expert(nn.Module):
    """A SwiGLU network, H -> I -> H."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """Each token goes through `top_k` of the experts, which are divided among the ranks of `group`."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.group = num_experts, top_k, group
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, intermediate) for _ in range(num_experts // self.ranks))

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        rows = x[order // self.top_k]
        counts = F.one_hot(slots, self.num_experts).sum(0)
        rows = self.feed(rows, counts) if self.group is None else self.feed_everywhere(rows, counts, self.group)
        rows = rows[order.argsort()].view(-1, self.top_k, x.shape[-1])
        return (rows * weights.unsqueeze(-1)).sum(1)

    def feed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that are sorted by expert, through this rank's experts."""
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])

    def feed_everywhere(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Rows that are sorted by expert, through the experts of all ranks."""
        local = len(self.experts)
        arriving = all_to_all_single(counts, None, None, group).view(self.ranks, local)
        sent = counts.view(self.ranks, local).sum(1).tolist()
        received = arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, group)
        # They arrive sorted by rank and then by expert; an expert wants all of its rows together.
        expert = torch.arange(local, device=rows.device).repeat(self.ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0]).argsort(stable=True)
        rows = self.feed(rows[order], arriving.sum(0))
        return all_to_all_single_autograd(rows[order.argsort()], sent, received, group)


class Block(nn.Module):
    """A small language model with one transformer block. Token ids [B, S] to logits [B, S, V]."""

    def __init__(
        self,
        vocabulary: int = 64,
        hidden: int = 64,
        heads: int = 4,
        intermediate: int = 96,
        num_experts: int = 4,
        top_k: int = 2,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.norm_attention = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm_moe = nn.RMSNorm(hidden)
        self.moe = MoE(hidden, intermediate, num_experts, top_k, group)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm_attention(x))
        x = x + self.moe(self.norm_moe(x).flatten(0, 1)).view_as(x)
        return self.head(x)
