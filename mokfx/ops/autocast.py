"""The autocast rule: under autocast a call runs in the autocast dtype, as the products it replaces would.

x and all weights and biases of experts are cast. `topk_weights` stays, since autocast lowers no weighted sum,
and so does float64, as in torch's own rules. `mok::moe_backward` needs no rule: it gets the tensors that the
forward ran on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mokfx.ops.arguments import Call
from mokfx.ops.schema import LIBRARY, MOE


def _rule(device_type: str) -> Callable[..., Tensor]:
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def moe(*args: Any, **settings: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        call = Call(*args, **settings)

        def cast(tensor: Tensor) -> Tensor:
            lowered = tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype) if lowered and tensor.device.type == device_type else tensor

        x, ids, weights, *others = call.tensors()
        args, settings = call.with_tensors([cast(x), ids, weights, *map(cast, others)]).arguments()
        with torch._C._ExcludeDispatchKeyGuard(below):
            return MOE(*args, **settings)

    return moe


LIBRARY.impl("moe", _rule("cpu"), "AutocastCPU")
LIBRARY.impl("moe", _rule("cuda"), "AutocastCUDA")
