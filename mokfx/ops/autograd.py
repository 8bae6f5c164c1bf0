"""Gradients of `mok::moe`: it runs as `mok::moe_forward`, and its gradient is one call of `mok::moe_backward`.

Registered for the Autograd key by hand, since torch.library.register_autograd refuses keyword-only tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mokfx.ops.arguments import Call
from mokfx.ops.schema import LIBRARY, MOE, MOE_BACKWARD, MOE_FORWARD

Keys = torch._C.DispatchKeySet


class _Moe(torch.autograd.Function):
    """Saves the op's own tensors and what the provider wants to keep besides.

    `form` is the call with stand-ins for its tensors: they come and are kept apart from it, so that hooks
    on saved tensors (checkpointing, offloading) see all of them.
    """

    @staticmethod
    def forward(ctx: Any, keys: Keys, form: Call, *tensors: Tensor) -> Any:
        ctx.form = form
        args, settings = form.with_tensors(tensors).arguments()
        y, saved = _below(keys, MOE_FORWARD, *args, **settings)
        ctx.kept = saved.dim() > 1
        ctx.save_for_backward(*tensors, *([saved] if ctx.kept else []))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        saved = tensors.pop() if ctx.kept else None
        args, settings = ctx.form.with_tensors(tensors).arguments()
        d_x, *others = MOE_BACKWARD(grad_y, *args, **settings, saved=saved)
        gradients = (d_x, None, *others)  # none for topk_ids
        needed = ctx.needs_input_grad[2:]
        return None, None, *(g if need else None for g, need in zip(gradients, needed, strict=True))


class _MoeBackward(torch.autograd.Function):
    """Lets a graph be made of the backward (create_graph=True), and says what is missing when it is used."""

    @staticmethod
    def forward(ctx: Any, keys: Keys, form: Call, saved: Tensor | None, grad_y: Tensor, *tensors: Tensor) -> Any:
        args, settings = form.with_tensors(tensors).arguments()
        return tuple(_below(keys, MOE_BACKWARD, grad_y, *args, **settings, saved=saved))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "mok.moe has no second derivative: its backward cannot be differentiated; "
            "use the eager model where gradients of gradients are needed"
        )


def _moe(keys: Keys, *args: Any, **settings: Any) -> Any:
    call = Call(*args, **settings)
    tensors = call.tensors()
    if not _needs_grad(tensors):
        return _below(keys, MOE, *args, **settings)
    return _Moe.apply(keys, call.with_tensors(range(len(tensors))), *tensors)


def _moe_forward(keys: Keys, *args: Any, **settings: Any) -> Any:
    if _needs_grad(Call(*args, **settings).tensors()):
        raise RuntimeError("mok.moe_forward is a part of mok.moe, which has the gradients: call torch.ops.mok.moe")
    return _below(keys, MOE_FORWARD, *args, **settings)


def _moe_backward(keys: Keys, grad_y: Tensor, *args: Any, saved: Tensor | None = None, **settings: Any) -> Any:
    call = Call(*args, **settings)
    tensors = call.tensors()
    if not _needs_grad([grad_y, *tensors]):
        return _below(keys, MOE_BACKWARD, grad_y, *args, **settings, saved=saved)
    return list(_MoeBackward.apply(keys, call.with_tensors(range(len(tensors))), saved, grad_y, *tensors))


def _needs_grad(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _below(keys: Keys, op: torch._ops.OpOverload, *args: Any, **settings: Any) -> Any:
    """Call `op` under the Autograd key."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **settings)


LIBRARY.impl("moe", _moe, "Autograd", with_keyset=True)
LIBRARY.impl("moe_forward", _moe_forward, "Autograd", with_keyset=True)
LIBRARY.impl("moe_backward", _moe_backward, "Autograd", with_keyset=True)
