"""Layers with capacity (Switch, GShard): every expert has C places, later slots are dropped, and all-to-alls
have equal splits. `CAPACITY[name](layer, x, routed) -> y`; `ORDER` says which slots come first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .router import Routed

if TYPE_CHECKING:
    from .layer import MoE

FACTOR = 0.75
"""Below one, so that tokens are really dropped."""


def capacity_of(layer: MoE, tokens: int) -> int:
    return max(math.ceil(tokens * layer.top_k * FACTOR / layer.experts), 1)


# --- each token's place: masks [T, E, C] ---


def switch_masks(layer: MoE, ids: Tensor, weights: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Top-1: the place is a running count down the column of the chosen expert."""
    mask = F.one_hot(ids[:, 0], layer.experts)
    place = (torch.cumsum(mask, dim=0) - 1) * mask
    mask = mask * torch.lt(place, capacity)
    places = F.one_hot((place * mask).sum(dim=1), capacity).to(weights.dtype)
    gates = weights * mask.to(weights.dtype)
    combine = torch.einsum("te,tc->tec", gates, places)
    return combine.bool().to(weights.dtype), combine


def gshard_masks(layer: MoE, ids: Tensor, weights: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Top-2: second choices queue behind all first choices."""
    mask1, mask2 = F.one_hot(ids[:, 0], layer.experts), F.one_hot(ids[:, 1], layer.experts)
    place1 = torch.cumsum(mask1, dim=0) - 1
    place2 = torch.cumsum(mask2, dim=0) - 1
    place2 += torch.sum(mask1, dim=0, keepdim=True)
    mask1 = mask1 * (place1 < capacity)
    mask2 = mask2 * (place2 < capacity)
    combine = torch.zeros(*mask1.shape, capacity, dtype=weights.dtype, device=ids.device)
    for choice, (mask, place) in enumerate(((mask1, place1), (mask2, place2))):
        at = F.one_hot((place * mask).sum(-1), capacity)
        kept = mask.unsqueeze(-1) * at.unsqueeze(1)
        combine = combine + weights[:, choice, None, None] * kept
    return (combine != 0).to(weights.dtype), combine


def queue_masks(layer: MoE, ids: Tensor, weights: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Any k: slots queue in token order, the places compared with a range."""
    tokens, k = ids.shape
    mask = F.one_hot(ids.reshape(-1), layer.experts)
    place = ((mask.cumsum(0) - 1) * mask).sum(-1)
    at = place.unsqueeze(-1) == torch.arange(capacity, device=ids.device)
    slots = (mask.unsqueeze(-1) * at.unsqueeze(1)).view(tokens, k, layer.experts, capacity).to(weights.dtype)
    return slots.sum(1), torch.einsum("tk,tkec->tec", weights, slots)


def queue_choice_masks(layer: MoE, ids: Tensor, weights: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Any k: first choices queue before second ones; a place beyond the last is cut off after one_hot."""
    tokens, k = ids.shape
    mask = F.one_hot(ids.t().reshape(-1), layer.experts)
    place = (mask.cumsum(dim=0) * mask).sum(dim=-1) - 1
    at = F.one_hot(place.clamp(max=capacity), capacity + 1)[:, :capacity]
    slots = (mask[:, :, None] * at[:, None, :]).view(k, tokens, layer.experts, capacity).to(weights.dtype)
    return slots.sum(dim=0), (slots * weights.t()[:, :, None, None]).sum(dim=0)


MASKS = {
    "switch": switch_masks,
    "gshard": gshard_masks,
    "queue": queue_masks,
    "queue_choice": queue_choice_masks,
}


def einsum_layer(masks: str) -> Callable[[MoE, Tensor, Routed], Tensor]:
    """Dispatch and combine as two products with masks."""

    def layer_of(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
        capacity = capacity_of(layer, x.shape[0])
        dispatch, combine = MASKS[masks](layer, routed.ids, routed.weights, capacity)
        buckets = torch.einsum("tec,th->ech", dispatch.to(x.dtype), x)
        return torch.einsum("tec,ech->th", combine.to(x.dtype), through_experts(layer, buckets))

    return layer_of


def slot_layer(layer: MoE, x: Tensor, routed: Routed) -> Tensor:
    """Rows written to `expert * C + place`, dropped ones beyond the last, and read back from there."""
    capacity, k = capacity_of(layer, x.shape[0]), layer.top_k
    flat = routed.ids.t().reshape(-1)
    mask = F.one_hot(flat, layer.experts)
    place = (mask.cumsum(0) - 1).gather(1, flat.unsqueeze(1)).squeeze(1)
    kept = place < capacity
    slot = torch.where(kept, flat * capacity + place, layer.experts * capacity)
    buckets = x.new_zeros(layer.experts * capacity + 1, x.shape[1])
    buckets = buckets.index_copy(0, slot, x.repeat(k, 1))[:-1].view(layer.experts, capacity, -1)
    out = through_experts(layer, buckets).reshape(layer.experts * capacity, -1)
    rows = torch.cat([out, out.new_zeros(1, out.shape[1])]).index_select(0, slot)
    weights = routed.weights.t().reshape(-1, 1) * kept.unsqueeze(1)
    return (rows * weights).view(k, *x.shape).sum(0)


def through_experts(layer: MoE, buckets: Tensor) -> Tensor:
    """[E, C, H] to [E, C, H], by way of the ranks that own the experts."""
    s, group = layer.spelling, layer.group
    if not s.exchange:
        return layer.ffn.batched(buckets, s.products)
    experts, capacity, hidden = buckets.shape
    ranks = dist.get_world_size(group)
    arrived = layer.form(buckets, None, None, group).view(ranks, -1, capacity, hidden)
    arrived = arrived.transpose(0, 1).reshape(experts // ranks, ranks * capacity, hidden)
    out = layer.ffn.batched(arrived, s.products).view(-1, ranks, capacity, hidden)
    out = out.permute(1, 0, 2, 3).contiguous().view(experts, capacity, hidden)
    return layer.form(out, None, None, group)


CAPACITY: dict[str, Callable[[MoE, Tensor, Routed], Tensor]] = {
    **{f"einsum_{name}": einsum_layer(name) for name in MASKS},
    "slot": slot_layer,
}
ORDER = {
    "einsum_switch": "choice",
    "einsum_gshard": "choice",
    "einsum_queue": "token",
    "einsum_queue_choice": "choice",
    "slot": "choice",
}
TOP_K = {"einsum_switch": 1, "einsum_gshard": 2}
"""The layers that are written for one number of choices."""
