"""The provider `hopper`: which calls of `mok::moe` the forward kernel can run, and running them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import build
from .activation import activation, biases
from .forward import MAX_CHOICES, MAX_EXPERTS, MAX_UNITS, UNIT, WEIGHT_KINDS, forward
from .weights import Matrices, gate_and_up, matrices

if TYPE_CHECKING:  # kernels depends on nothing of mokfx at run time
    from mokfx.ops.arguments import Call

NAME = "hopper"


def supports(call: Call) -> str | None:
    """None if the kernel can run the call, or the reason why not. Reads no values: fake tensors will do."""
    return machine_reason(call.x.device) or call_reason(call)


@functools.cache  # asked at every call
def machine_reason(device: torch.device) -> str | None:
    """Why this machine cannot run the kernels on `device`, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"x is on {device.type}, and the kernels need an NVIDIA H100 or H200"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 9.0"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed (pip install mokfx[cuda])"
    return build.unavailable()


def call_reason(call: Call) -> str | None:
    """Why the kernel cannot run the call on any machine, or None."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors()):
        return "it needs gradients, and only the forward is built"
    if call.group_name is not None:
        return "it is of an expert-parallel group, and only one rank is built"
    if call.x.dtype != torch.bfloat16 or call.y_dtype != torch.bfloat16:
        return f"x is {call.x.dtype} and y {call.y_dtype}, and only torch.bfloat16 is built"
    if activation(call.activation, call.activation_args) is None:
        return f"the activation {call.activation!r} is not built"
    if call.shared_w_gate is not None:
        return "it has a shared expert"
    if call.weight_on != "output":
        return f"weights apply to the {call.weight_on!r}, and only 'output' is built"
    if call.capacity is not None:
        return "it has a capacity"
    return _size_reason(call) or _layout_reason(call)


def _size_reason(call: Call) -> str | None:
    width, inner, choices = call.x.shape[1], call.w_down[0].shape[-2], call.topk_ids.shape[1]
    if width % UNIT or inner % UNIT:
        return f"H is {width} and I {inner}, and both must be multiples of {UNIT}"
    if call.num_experts > MAX_EXPERTS or choices > MAX_CHOICES:
        return f"{call.num_experts} experts and {choices} choices, of at most {MAX_EXPERTS} and {MAX_CHOICES}"
    tokens = call.x.shape[0]
    if isinstance(tokens, int):  # a symbolic number is checked when the call is made
        return _tokens_reason(tokens * choices, call.num_experts)
    return None


def _tokens_reason(slots: int, experts: int) -> str | None:
    if slots // UNIT + experts > MAX_UNITS:
        return f"{slots} slots, of at most {(MAX_UNITS - experts) * UNIT}"
    return None


def _layout_reason(call: Call) -> str | None:
    found = _weights(call, with_address=False)
    return found if isinstance(found, str) else None


def _weights(call: Call, with_address: bool) -> tuple[Matrices, Matrices, Matrices] | str:
    first = gate_and_up(call.w_gate, call.w_up, call.gate_up, with_address=with_address)
    down = matrices(call.w_down, with_address=with_address)
    if isinstance(first, str):
        return first
    if isinstance(down, str):
        return down
    if first[0].n_major != first[1].n_major:
        return "gate and up are stored in different orders"
    return next((why for one in (*first, down) if (why := one.unreadable())), (*first, down))


def run(call: Call) -> Tensor:
    """`mok::moe` of a call that `supports` accepts.

    Raises RuntimeError for what fake tensors cannot tell: too many tokens, or weights at an odd address.
    """
    if reason := _tokens_reason(call.topk_ids.numel(), call.num_experts):
        raise RuntimeError(f"mok.moe: provider {NAME!r} cannot run this call: {reason}")
    found = _weights(call, with_address=True)
    if isinstance(found, str):
        raise RuntimeError(f"mok.moe: provider {NAME!r} cannot run this call: {found}")
    x = call.x
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    weights = call.topk_weights.contiguous()
    if weights.dtype not in WEIGHT_KINDS:
        weights = weights.float()
    act = activation(call.activation, call.activation_args)
    assert act is not None, "supports() refuses other activations"
    bias = biases(call.b_gate, call.b_up, call.b_down, call.gate_up)
    return forward(x, call.topk_ids.contiguous(), weights, *found, act=act, bias=bias)


def run_saving(call: Call) -> tuple[Tensor, Tensor]:
    """`mok::moe_forward` of a call that `supports` accepts: y and the pre-activations of `saved_shape`."""
    raise RuntimeError(f"mok.moe: provider {NAME!r} has no backward yet, so there is nothing to save for one")


def saved_shape(call: Call) -> tuple[int | torch.SymInt, ...]:
    """[2, rows, I]: gate's and up's outputs of each sorted row, before the activation; rows = n + 64 E in whole 64s."""
    rows = (call.topk_ids.numel() // UNIT + call.num_experts) * UNIT
    return 2, rows, call.w_down[0].shape[-2]


def backward(grad_y: Tensor, call: Call, saved: Tensor | None) -> list[Tensor]:
    """Not built: raises RuntimeError that says what to do. `supports` refuses calls known to need it."""
    raise RuntimeError(
        f"mok.moe: provider {NAME!r} has no backward yet: run the forward under torch.no_grad(), or choose "
        "another provider with mokfx.ops.set_provider"
    )


def version() -> str:
    """The kernels' build key, which changes with their sources."""
    return build.source_key()
