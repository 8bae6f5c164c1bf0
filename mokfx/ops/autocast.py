"""The autocast rules: under autocast a call runs in the autocast dtype, as the products it replaces would.

x and all weights and biases of experts are cast. `topk_weights` stays, since autocast lowers no weighted sum,
and so does float64, as in torch's own rules. `mok::moe_forward` and `mok::moe_backward` cast nothing: they get what
was cast already. All run with autocast off, or it would lower a provider's own products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mokfx.ops.arguments import Call
from mokfx.ops.schema import LIBRARY, MOE, MOE_BACKWARD, MOE_FORWARD


def _register(device_type: str, key: str) -> None:
    own_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def moe(*args: Any, **settings: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor) -> Tensor:
            lowered = tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype) if lowered and tensor.device.type == device_type else tensor

        call = Call(*args, **settings)
        x, ids, weights, *others = call.tensors()
        args, settings = call.with_tensors([cast(x), ids, weights, *map(cast, others)]).arguments()
        with torch._C._ExcludeDispatchKeyGuard(own_keys):
            return MOE(*args, **settings)

    def as_it_is(op: torch._ops.OpOverload) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(own_keys):
                return op(*args, **settings)

        return run

    LIBRARY.impl("moe", moe, key)
    LIBRARY.impl("moe_forward", as_it_is(MOE_FORWARD), key)
    LIBRARY.impl("moe_backward", as_it_is(MOE_BACKWARD), key)


_register("cpu", "AutocastCPU")
_register("cuda", "AutocastCUDA")
