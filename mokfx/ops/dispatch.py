"""The ops' bodies: check the call, choose its provider, run it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mokfx.kernels import provider as hopper
from mokfx.ops import reference
from mokfx.ops.arguments import Call
from mokfx.ops.checks import check, check_gradient
from mokfx.ops.providers import REFERENCE, register_provider, select
from mokfx.ops.schema import LIBRARY

register_provider(REFERENCE, reference.forward, reference.backward, supports=lambda call: None)
register_provider(hopper.NAME, hopper.run, hopper.backward, supports=hopper.supports, version=hopper.version)


def _moe(*args: Any, **settings: Any) -> Tensor:
    call = Call(*args, **settings)
    check(call)
    return select(call).forward(call)


def _moe_backward(grad_y: Tensor, *args: Any, **settings: Any) -> list[Tensor]:
    call = Call(*args, **settings)
    check(call)
    check_gradient(grad_y, call)
    return select(call).backward(grad_y, call)


# One body for every device: which devices run is for the providers to say.
LIBRARY.impl("moe", _moe, "CompositeExplicitAutograd")
LIBRARY.impl("moe_backward", _moe_backward, "CompositeExplicitAutograd")
