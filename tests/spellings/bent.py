"""All-to-alls whose gradient is not that of the exchange: what a user's autograd.Function may get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import Form, Group, Splits, functional, plain


def bent(backward_of: Any) -> Form:
    """The form whose backward is `backward_of(grad, out_splits, in_splits, group)` (the forward's splits)."""

    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
            ctx.rest = out_splits, in_splits, group
            return plain(x, out_splits, in_splits, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
            return backward_of(grad, *ctx.rest), None, None, None

    def form(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
        return Bent.apply(x, out_splits, in_splits, group)

    return form


def _scaled(grad: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return plain(grad, in_splits, out_splits, group) * 2


def _flipped(grad: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return plain(grad, in_splits, out_splits, group).flip(0)


def _zeros(grad: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return torch.zeros_like(plain(grad, in_splits, out_splits, group))


def _identity(grad: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return grad.clone()


scaled, flipped, zeros, identity = bent(_scaled), bent(_flipped), bent(_zeros), bent(_identity)


def detached(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return functional(x.detach(), out_splits, in_splits, group)


def under_no_grad(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    with torch.no_grad():
        return functional(x, out_splits, in_splits, group)
