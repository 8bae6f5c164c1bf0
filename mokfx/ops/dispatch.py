"""The ops' bodies: check the call, choose its provider, run it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mokfx.kernels import provider as hopper
from mokfx.ops import reference
from mokfx.ops.arguments import Call
from mokfx.ops.checks import check, check_gradient
from mokfx.ops.providers import REFERENCE, Provider, register_provider, select
from mokfx.ops.schema import LIBRARY

register_provider(
    Provider(
        REFERENCE,
        forward=reference.forward,
        forward_saving=lambda call: (reference.forward(call), call.x.new_empty(0)),
        backward=lambda grad_y, call, saved: reference.backward(grad_y, call),
        supports=lambda call: None,
        saved_shape=lambda call: (0,),
        version=lambda: "",
    )
)
register_provider(
    Provider(
        hopper.NAME,
        forward=hopper.run,
        forward_saving=hopper.run_saving,
        backward=hopper.backward,
        supports=hopper.supports,
        saved_shape=hopper.saved_shape,
        version=hopper.version,
    )
)


def _moe(*args: Any, **settings: Any) -> Tensor:
    call = Call(*args, **settings)
    check(call)
    return select(call).forward(call)


def _moe_forward(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **settings)
    check(call)
    return select(call).forward_saving(call)


def _moe_backward(grad_y: Tensor, *args: Any, saved: Tensor | None = None, **settings: Any) -> list[Tensor]:
    call = Call(*args, **settings)
    check(call)
    check_gradient(grad_y, call)
    return select(call).backward(grad_y, call, saved)


# One body for every device: which devices run is for the providers to say.
LIBRARY.impl("moe", _moe, "CompositeExplicitAutograd")
LIBRARY.impl("moe_forward", _moe_forward, "CompositeExplicitAutograd")
LIBRARY.impl("moe_backward", _moe_backward, "CompositeExplicitAutograd")
