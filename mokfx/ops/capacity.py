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
    in_order = ids.t() if call.capacity_order == "choice" else ids
    kept = torch.where(_rank_in_expert(in_order.reshape(-1)) < call.capacity, in_order.reshape(-1), -1)
    return kept.view(ids.shape[1], ids.shape[0]).t() if call.capacity_order == "choice" else kept.view_as(ids)


def _rank_in_expert(ids: Tensor) -> Tensor:
    """For each element of `ids` `[n]`, how many equal ones come before it."""
    order = torch.argsort(ids, stable=True)
    ordered = ids[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(ids.numel(), device=ids.device) - torch.searchsorted(ordered, ordered)
    return rank
