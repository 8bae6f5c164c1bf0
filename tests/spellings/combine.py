"""Combine: outputs of slots in order of expert [n, H] back to tokens [T, H], weighted.

`weights` [T, k] is None when the weight was applied earlier (to the input, the hidden, or by the receiver).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# --- back to slot order ---


def by_argsort(out: Tensor, order: Tensor) -> Tensor:
    return out[order.argsort()]


def by_torch_argsort(out: Tensor, order: Tensor) -> Tensor:
    return out.index_select(0, torch.argsort(order, dim=-1))


def by_scatter(out: Tensor, order: Tensor) -> Tensor:
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return out[inverse]


def by_setitem(out: Tensor, order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return out[inverse]


def by_row_setitem(out: Tensor, order: Tensor) -> Tensor:
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    return unsorted


def by_row_zeros_setitem(out: Tensor, order: Tensor) -> Tensor:
    unsorted = out.new_zeros(out.shape)
    unsorted[order, :] = out
    return unsorted


def by_index_copy(out: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(out).index_copy_(0, order, out)


def by_index_put(out: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(out).index_put((order,), out)


def by_row_scatter(out: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(out).scatter(0, order.unsqueeze(-1).expand_as(out), out)


UNSORT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        by_argsort,
        by_torch_argsort,
        by_scatter,
        by_setitem,
        by_row_setitem,
        by_row_zeros_setitem,
        by_index_copy,
        by_index_put,
        by_row_scatter,
    )
}

# --- slots [T, k, H] and weights [T, k] to tokens [T, H] ---


def mul_sum(slots: Tensor, weights: Tensor) -> Tensor:
    return (slots * weights.unsqueeze(-1)).sum(dim=1)


def mul_inplace_sum(slots: Tensor, weights: Tensor) -> Tensor:
    slots = slots.clone()
    slots *= weights[..., None]
    return torch.sum(slots, 1)


def mul_method_sum(slots: Tensor, weights: Tensor) -> Tensor:
    return slots.mul(weights.view(*weights.shape, 1)).sum(-2)


def einsum(slots: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("tkh,tk->th", slots, weights)


def bmm(slots: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), slots).squeeze(1)


def matmul(slots: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-2) @ slots).squeeze(1)


def add_choices(slots: Tensor, weights: Tensor) -> Tensor:
    y = slots[:, 0] * weights[:, 0:1]
    for choice in range(1, weights.shape[1]):
        y = y + slots[:, choice] * weights[:, choice, None]
    return y


REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (mul_sum, mul_inplace_sum, mul_method_sum, einsum, bmm, matmul, add_choices)
}

# --- straight from sorted outputs into tokens [T, H], with the number of each row's token [n] ---


def index_add_(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    y.index_add_(0, tokens, out)
    return y


def index_add(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    return torch.index_add(y, 0, tokens, out)


def scatter_add_(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    return y.scatter_add_(0, tokens.view(-1, 1).expand(-1, out.shape[1]), out)


def scatter_add(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    return y.scatter_add(dim=0, index=tokens.unsqueeze(1).expand_as(out), src=out)


def scatter_add_repeat(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    return torch.scatter_add(y, 0, tokens.reshape(-1, 1).repeat(1, out.shape[-1]), out)


def index_put_accumulate(y: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    return y.index_put_((tokens,), out, accumulate=True)


ACCUMULATE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (index_add_, index_add, scatter_add_, scatter_add, scatter_add_repeat, index_put_accumulate)
}


def combine(
    unsort: str,
    finish: str,
    out: Tensor,
    order: Tensor,
    weights: Tensor | None,
    tokens: int,
    k: int,
    *,
    by_choice: bool,
    start: Tensor | None = None,
) -> Tensor:
    """Sorted outputs to tokens [T, H], by the two named choices; added into `start` if there is one."""
    if finish in ACCUMULATE:
        if weights is not None:
            flat = weights.t().reshape(-1) if by_choice else weights.reshape(-1)
            out = (out * flat[order].unsqueeze(-1)).to(out.dtype)
        if start is None:
            start = torch.zeros(tokens, out.shape[1], dtype=out.dtype, device=out.device)
        return ACCUMULATE[finish](start, order % tokens if by_choice else order // k, out)
    slots = UNSORT[unsort](out, order)
    slots = (
        slots.view(k, tokens, out.shape[-1]).transpose(0, 1)
        if by_choice
        else slots.view(tokens, k, out.shape[-1])
    )
    if weights is None:
        return slots.sum(dim=1)
    if finish in ("einsum", "bmm", "matmul"):  # these want one dtype
        weights = weights.to(slots.dtype)
    return REDUCE[finish](slots, weights)
