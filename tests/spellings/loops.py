"""Layers that do not sort: loops over experts that search for their tokens. `loop(layer, x, routed) -> y`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .router import Routed

if TYPE_CHECKING:
    from .layer import MoE


def where_one_hot(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """Mixtral as first published."""
    mask = F.one_hot(routed.ids, num_classes=layer.experts).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        choice, token = torch.where(mask[e])
        rows = x[None, token].reshape(-1, x.shape[-1])
        out = layer.ffn.one(e, rows) * routed.weights[token, choice, None]
        y.index_add_(0, token, out.to(x.dtype))
    return y


def where_ids(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """Mistral's own reference: rows added at an index."""
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        token, choice = torch.where(routed.ids == e)
        y[token] += (routed.weights[token, choice, None] * layer.ffn.one(e, x[token])).to(x.dtype)
    return y


def nonzero_pairs(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    y = x.new_zeros(x.shape)
    for e in range(layer.experts):
        token, choice = (routed.ids == e).nonzero(as_tuple=True)
        out = layer.ffn.one(e, x.index_select(0, token))
        y = y.index_add(0, token, (out * routed.weights[token, choice].unsqueeze(1)).to(x.dtype))
    return y


def nonzero_slots(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """A search through the flat slots."""
    flat, weights = routed.ids.view(-1), routed.weights.reshape(-1, 1)
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        slot = torch.nonzero(flat == e).squeeze(-1)
        token = torch.div(slot, layer.top_k, rounding_mode="floor")
        y.index_add_(0, token, (layer.ffn.one(e, x[token]) * weights[slot]).to(x.dtype))
    return y


def mask_slots(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """DeepSeek's training code: a boolean mask over the repeated tokens."""
    flat = routed.ids.flatten()
    repeated = x.repeat_interleave(layer.top_k, dim=0)
    out = torch.empty_like(repeated)
    for e in range(layer.experts):
        out[flat == e] = layer.ffn.one(e, repeated[flat == e])
    return (out.view(*routed.ids.shape, x.shape[-1]) * routed.weights.unsqueeze(-1)).sum(dim=1)


def mask_tokens(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """A boolean mask over the tokens of each choice."""
    y = torch.zeros_like(x)
    for choice in range(layer.top_k):
        for e in range(layer.experts):
            mine = routed.ids[:, choice] == e
            y[mine] += (layer.ffn.one(e, x[mine]) * routed.weights[mine, choice, None]).to(x.dtype)
    return y


def where_skip_empty(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """Experts without a token are passed over."""
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        token, choice = torch.where(routed.ids == e)
        if token.shape[0] == 0:
            continue
        y.index_add_(0, token, (layer.ffn.one(e, x[token]) * routed.weights[token, choice, None]).to(x.dtype))
    return y


def mask_skip_empty(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """nanoGPT's descendants: `if mask.any()`."""
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        chosen = routed.ids == e
        mine = chosen.any(dim=-1)
        if mine.any():
            weight = (routed.weights * chosen).sum(dim=-1)[mine].unsqueeze(-1)
            y[mine] += (layer.ffn.one(e, x[mine]) * weight).to(x.dtype)
    return y


def counts_tolist_skip(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """DeepSeek-V3's reference: bincount to Python, then a search only for experts in use."""
    y = torch.zeros_like(x)
    counts = torch.bincount(routed.ids.flatten(), minlength=layer.experts).tolist()
    for e in range(layer.experts):
        if counts[e] == 0:
            continue
        token, choice = torch.where(routed.ids == e)
        y[token] += (layer.ffn.one(e, x[token]) * routed.weights[token, choice, None]).to(x.dtype)
    return y


def hit_experts(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """Mixtral in today's transformers: only the experts that were hit, by nonzero."""
    with torch.no_grad():
        mask = F.one_hot(routed.ids, num_classes=layer.experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    y = torch.zeros_like(x)
    for index in hit:
        e = index[0]
        choice, token = torch.where(mask[e])
        out = layer.ffn.one(e, x[token]) * routed.weights[token, choice, None]
        y.index_add_(0, token, out.to(x.dtype))
    return y


def unique_experts(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    y = torch.zeros_like(x)
    for e in routed.ids.unique().tolist():
        token, choice = torch.where(routed.ids == e)
        y.index_add_(0, token, (layer.ffn.one(e, x[token]) * routed.weights[token, choice, None]).to(x.dtype))
    return y


def gathered_slots(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """No sort, no search: every slot brings a copy of its expert's weights (transformers' batched_mm)."""
    flat = routed.ids.reshape(-1)
    rows = x.repeat_interleave(layer.top_k, dim=0)
    out = layer.ffn.gathered(rows, flat)
    return (out * routed.weights.reshape(-1, 1)).view(*routed.ids.shape, x.shape[-1]).sum(dim=1)


LOOPS: dict[str, Callable[[MoE, Tensor, Routed], Tensor]] = {
    f.__name__: f
    for f in (
        where_one_hot,
        where_ids,
        nonzero_pairs,
        nonzero_slots,
        mask_slots,
        mask_tokens,
        where_skip_empty,
        mask_skip_empty,
        counts_tolist_skip,
        hit_experts,
        unique_experts,
        gathered_slots,
    )
}
STACKED_ONLY = {"hit_experts", "gathered_slots"}
"""These index the experts with a tensor, which an `nn.ModuleList` does not take."""
DISTINCT_ONLY = {"mask_skip_empty", "where_ids", "counts_tolist_skip"}
"""These take a token's choices to be different experts, which a hash of the token need not give."""
