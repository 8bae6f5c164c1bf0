"""Which slots stay when an expert takes only so many of a rank's slots."""

from __future__ import annotations

import torch
from torch import Tensor

from mokfx.ops.arguments import Call


def kept_ids(call: Call) -> Tensor:
    """`topk_ids` `[T, k]` as int64, with -1 for the slots that `capacity` drops."""
    ids = call.topk_ids.long()
    if call.capacity is None:
        return ids
    by_choice = call.capacity_order == "choice"
    in_order = ids.t().flatten() if by_choice else ids.flatten()
    kept = in_order.masked_fill(torch.ge(_rank_in_expert(in_order), int(call.capacity)), -1)
    return kept.view(ids.shape[1], ids.shape[0]).t() if by_choice else kept.view(ids.shape)


def _rank_in_expert(ids: Tensor) -> Tensor:
    """For each element of `ids` `[n]`, how many equal ones come before it."""
    order = torch.argsort(ids, stable=True)
    ordered = ids[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(ids.numel(), device=ids.device) - torch.searchsorted(ordered, ordered)
    return rank
