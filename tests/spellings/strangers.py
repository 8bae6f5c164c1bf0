"""Modules that look like an MoE layer, or share a part with one, and are something else.

`STRANGERS` holds `name -> (wrong, build)`; `build(sizes, group, dtype)` makes a module of x [T, H]. None of
them may be rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import functional
from .spelling import Sizes


class _Stacked(nn.Module):
    """A router and stacked SwiGLU experts, for the modules below."""

    def __init__(self, sizes: Sizes, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        self.group: Any = group

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype) / shape[-2] ** 0.5)

        self.router = parameter(sizes.hidden, sizes.experts)
        self.gate = parameter(sizes.experts, sizes.hidden, sizes.intermediate)
        self.up = parameter(sizes.experts, sizes.hidden, sizes.intermediate)
        self.down = parameter(sizes.experts, sizes.intermediate, sizes.hidden)

    def ffn(self, buckets: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(buckets, self.gate)) * torch.bmm(buckets, self.up), self.down)


class ExpertChoice(_Stacked):
    """Experts choose tokens: each takes the C tokens that like it most."""

    def forward(self, x: Tensor) -> Tensor:
        probs = F.softmax(x @ self.router, dim=-1)
        weights, tokens = torch.topk(probs.t(), x.shape[0] * self.sizes.top_k // self.sizes.experts, dim=1)
        out = self.ffn(x[tokens]) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, tokens.reshape(-1), out.reshape(-1, x.shape[1]))


class SoftMixture(_Stacked):
    """Soft MoE: every place of every expert is a mixture of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router
        buckets = torch.einsum("te,th->eh", logits.softmax(0), x).unsqueeze(1)
        return torch.einsum("te,eh->th", logits.softmax(1), self.ffn(buckets).squeeze(1))


class LargestChoice(_Stacked):
    """A token gets the largest of its experts' outputs, element by element."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.sizes.top_k
        weights, ids = (x @ self.router).softmax(-1).topk(k)
        rows = x.repeat_interleave(k, 0).unsqueeze(1)
        flat = ids.view(-1)
        h = F.silu(torch.bmm(rows, self.gate[flat])) * torch.bmm(rows, self.up[flat])
        out = torch.bmm(h, self.down[flat]).view(x.shape[0], k, -1)
        return (out * weights.unsqueeze(-1)).amax(dim=1)


class ManyHeads(_Stacked):
    """A batched product over heads, with SwiGLU: no router at all."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unsqueeze(0).expand(self.sizes.experts, -1, -1)
        return self.ffn(heads).mean(0) + (x @ self.router).sum(1, keepdim=True)


class SortedEmbedding(_Stacked):
    """Sort, gather, unsort: a reordering without any expert."""

    def forward(self, x: Tensor) -> Tensor:
        order = (x @ self.router).argmax(-1).argsort()
        return (x[order] @ self.gate[0] @ self.down[0])[order.argsort()]


class SequenceParallel(_Stacked):
    """An all-to-all that moves from sequence shards to feature shards and back (Ulysses)."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        shards = x.view(x.shape[0], ranks, -1).transpose(0, 1).contiguous()
        shards = functional(shards, None, None, self.group)
        shards = F.silu(shards - shards.mean(dim=(0, 1)))
        back = functional(shards, None, None, self.group)
        return back.transpose(0, 1).reshape(x.shape) + (x @ self.router).sum(1, keepdim=True)


STRANGERS: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "expert_choice": ("the experts choose the tokens", ExpertChoice),
    "soft_mixture": ("the experts get mixtures of tokens", SoftMixture),
    "largest_choice": ("the choices are not summed", LargestChoice),
    "many_heads": ("there is no router", ManyHeads),
    "sorted_embedding": ("there are no experts", SortedEmbedding),
    "sequence_parallel": ("the all-to-all has nothing to do with experts", SequenceParallel),
}
NEEDS_GROUP = {"sequence_parallel"}
