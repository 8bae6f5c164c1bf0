"""One all-to-all of rows, as people call it: `form(x, out_splits, in_splits, group)`; None when equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

Splits = list[int] | None
Group = dist.ProcessGroup
Form = Callable[[Tensor, Splits, Splits, Group], Tensor]


def plain(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    """Eager autograd does not see through this one: training with it in eager loses gradients."""
    rows = x.shape[0] if out_splits is None else sum(out_splits)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits, group=group)
    return out


def plain_keywords(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    if out_splits is None:
        out = torch.empty_like(x)
        dist.all_to_all_single(output=out, input=x, group=group)
        return out
    out = torch.empty(sum(out_splits), *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_to_all_single(
        output=out, input=x, output_split_sizes=out_splits, input_split_sizes=in_splits, group=group
    )
    return out


def functional(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits, group))


def functional_unwaited(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    """The wait is left to the first use."""
    return funcol.all_to_all_single(x, out_splits, in_splits, group)


def functional_autograd(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return funcol.all_to_all_single_autograd(x, out_splits, in_splits, group)


class _Mirror(torch.autograd.Function):
    """The backward written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
        ctx.out_splits, ctx.in_splits, ctx.group = out_splits, in_splits, group
        return plain(x, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return plain(grad, ctx.in_splits, ctx.out_splits, ctx.group), None, None, None


class _Recursive(torch.autograd.Function):
    """The backward is the same Function with the splits exchanged (Megatron, DeepSpeed)."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, out_splits: Splits, in_splits: Splits) -> Tensor:
        ctx.group = group
        ctx.out_splits = out_splits
        ctx.in_splits = in_splits
        x = x.contiguous()
        if out_splits is None:
            out = torch.empty_like(x)
        else:
            out = x.new_empty(size=[sum(out_splits), *list(x.size()[1:])], dtype=x.dtype)
        dist.all_to_all_single(
            out, x, output_split_sizes=out_splits, input_split_sizes=in_splits, group=group
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _Recursive.apply(ctx.group, *grads, ctx.in_splits, ctx.out_splits), None, None


class _Functional(torch.autograd.Function):
    """Functional collectives inside, the context set apart."""

    @staticmethod
    def forward(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
        return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.out_splits, ctx.in_splits, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = funcol.all_to_all_single(grad.contiguous(), ctx.in_splits, ctx.out_splits, ctx.group)
        return funcol.wait_tensor(back), None, None, None


class _Listed(torch.autograd.Function):
    """The list form: a tensor to and from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
        ctx.out_splits, ctx.in_splits, ctx.group = out_splits, in_splits, group
        return _all_to_all_list(x, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_list(grad.contiguous(), ctx.in_splits, ctx.out_splits, ctx.group), None, None, None


def _all_to_all_list(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    sends = list(x.chunk(ranks) if in_splits is None else x.split(in_splits))
    sizes = [x.shape[0] // ranks] * ranks if out_splits is None else out_splits
    receives = [x.new_empty((size, *x.shape[1:])) for size in sizes]
    dist.all_to_all(receives, sends, group=group)
    return torch.cat(receives)


def listed(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return _Listed.apply(x, out_splits, in_splits, group)


def function_mirror(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return _Mirror.apply(x, out_splits, in_splits, group)


def function_recursive(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return _Recursive.apply(group, x, out_splits, in_splits)


def function_functional(x: Tensor, out_splits: Splits, in_splits: Splits, group: Group) -> Tensor:
    return _Functional.apply(x, out_splits, in_splits, group)


EXCHANGES: dict[str, Form] = {
    f.__name__: f
    for f in (
        plain,
        plain_keywords,
        functional,
        functional_unwaited,
        functional_autograd,
        function_mirror,
        function_recursive,
        function_functional,
        listed,
    )
}
CUT_IN_EAGER = {"plain", "plain_keywords"}
"""Eager autograd stops at these, though compiled code differentiates them."""
