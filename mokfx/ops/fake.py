"""Shapes, dtypes and strides of the ops' outputs for tracing, which checks the arguments as a run does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mokfx.ops.arguments import Call
from mokfx.ops.checks import check, check_gradient
from mokfx.ops.providers import select
from mokfx.ops.schema import LIBRARY


@torch.library.register_fake("mok::moe", lib=LIBRARY)
def _moe(*args: Any, **settings: Any) -> Tensor:
    call = Call(*args, **settings)
    check(call)
    return call.x.new_empty(call.x.shape, dtype=call.y_dtype)


@torch.library.register_fake("mok::moe_forward", lib=LIBRARY)
def _moe_forward(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **settings)
    y = _moe(*args, **settings)
    return y, call.x.new_empty(select(call).saved_shape(call))


@torch.library.register_fake("mok::moe_backward", lib=LIBRARY)
def _moe_backward(grad_y: Tensor, *args: Any, saved: Tensor | None = None, **settings: Any) -> list[Tensor]:
    call = Call(*args, **settings)
    check(call)
    check_gradient(grad_y, call)
    return call.empty_gradients().gradients()
