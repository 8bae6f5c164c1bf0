"""Dispatch: flatten ids [T, k] to slots, sort by expert, fetch each slot's token, count each expert's slots.

Slots are numbered `token * k + choice` ("token" order) or `choice * T + token` ("choice" order).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FLATTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda ids: ids.view(-1),
    "reshape": lambda ids: torch.reshape(ids, (-1,)),
    "flatten": lambda ids: ids.flatten(),
    "t_reshape": lambda ids: ids.t().reshape(-1),
    "transpose_flatten": lambda ids: torch.flatten(ids.transpose(0, 1).contiguous()),
}
"""[T, k] to [T * k]; the last two are in choice order."""
CHOICE_ORDER = {"t_reshape", "transpose_flatten"}

SORT: dict[str, Callable[[Tensor], Tensor]] = {
    "argsort": lambda flat: flat.argsort(),
    "argsort_stable": lambda flat: torch.argsort(flat, stable=True),
    "argsort_dim": lambda flat: torch.argsort(flat, dim=0),
    "sort": lambda flat: torch.sort(flat)[1],
    "sort_stable": lambda flat: flat.sort(dim=-1, stable=True).indices,
}
"""Flat ids [n] to the slots in order of expert [n]."""


def floordiv(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x[order // k]


def torch_div(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x[torch.div(order, k, rounding_mode="floor")]


def index_select(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.index_select(0, order // k)


def gather(x: Tensor, order: Tensor, k: int) -> Tensor:
    tokens = order.div(k, rounding_mode="trunc").unsqueeze(-1).expand(-1, x.shape[-1])
    return torch.gather(x, 0, tokens)


def repeat_interleave(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.repeat_interleave(k, dim=0)[order]


def expand(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.unsqueeze(1).expand(-1, k, -1).reshape(-1, x.shape[-1])[order]


def token_table(x: Tensor, order: Tensor, k: int) -> Tensor:
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(k)
    return x[tokens[order]]


def token_view(x: Tensor, order: Tensor, k: int) -> Tensor:
    tokens = torch.arange(x.shape[0], device=x.device).view(-1, 1).expand(-1, k).reshape(-1)
    return torch.index_select(x, 0, tokens.index_select(0, order))


def modulo(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x[order % x.shape[0]]


def remainder(x: Tensor, order: Tensor, k: int) -> Tensor:
    return torch.index_select(x, 0, torch.remainder(order, x.size(0)))


def repeat(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.repeat(k, 1)[order]


def token_table_repeat(x: Tensor, order: Tensor, k: int) -> Tensor:
    tokens = torch.arange(x.shape[0], device=x.device).repeat(k)
    return x[tokens[order], :]


ROWS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    f.__name__: f
    for f in (floordiv, torch_div, index_select, gather, repeat_interleave, expand, token_table, token_view)
}
"""For token order: x [T, H], order [n], k to rows [n, H]."""
ROWS_BY_CHOICE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    f.__name__: f for f in (modulo, remainder, repeat, token_table_repeat)
}
"""The same for choice order."""

COUNTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "bincount": lambda ids, e: torch.bincount(ids.view(-1), minlength=e),
    "bincount_method": lambda ids, e: ids.flatten().bincount(minlength=e),
    "histc": lambda ids, e: torch.histc(ids.float().view(-1), bins=e, min=0, max=e - 1).to(torch.int64),
    "histc_float": lambda ids, e: torch.histc(ids.float(), bins=e, min=0, max=e - 1),
    "histc_sorted": lambda ids, e: ids.float().histc(bins=e, min=0, max=e - 1).long(),
    "searchsorted": lambda ids, e: torch.diff(
        torch.searchsorted(ids, torch.arange(e, device=ids.device), right=True), prepend=ids.new_zeros(1)
    ),
    "one_hot_sum": lambda ids, e: F.one_hot(ids.reshape(-1), num_classes=e).sum(0),
    "one_hot_sum2": lambda ids, e: F.one_hot(ids, e).sum(dim=(0, 1)),
    "scatter_add": lambda ids, e: torch.zeros(e, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids.reshape(-1), torch.ones_like(ids.reshape(-1))
    ),
    "index_add": lambda ids, e: ids.new_zeros(e).index_add_(
        0, ids.reshape(-1), torch.ones_like(ids).reshape(-1)
    ),
    "scatter_sum": lambda ids, e: ids.new_zeros((ids.shape[0], e)).scatter_(1, ids, 1).sum(0),
    "equals_sum": lambda ids, e: (ids.reshape(-1, 1) == torch.arange(e, device=ids.device)).sum(0),
    "equals_sum2": lambda ids, e: ids.unsqueeze(-1).eq(torch.arange(e, device=ids.device)).sum(dim=[0, 1]),
}
"""ids [T, k] (or received ids [n]) and the number of experts to each expert's number of slots [E] int64."""
COUNTS_OF_CHOICES = {"one_hot_sum2", "scatter_sum", "equals_sum2"}
"""These read the ids as [T, k], so cannot count ids received as a flat list."""
COUNTS_OF_SORTED = {"histc_sorted", "histc_float", "searchsorted"}
"""These read the ids in sorted order."""
FLOAT_COUNTS = {"histc_float"}
"""Only good for running sums, which cast them."""
COUNTS_OF_DISTINCT = {"scatter_sum"}
"""These count a token once for an expert that it chose twice."""
