"""The provider `hopper`: which calls of `mok::moe` the kernels can run, and running them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import build
from .activation import Biases, activation, biases, side_by_side
from .forward import MAX_CHOICES, MAX_EXPERTS, MAX_UNITS, WEIGHT_KINDS, forward
from .gradients import gradients
from .layer import Layer, SharedExpert
from .settings import settings
from .shared_gradients import shared_gradients
from .weights import FirstLayer, Matrices, first_layer, matrices
from .workspace import UNIT, rows_of

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
    if call.group_name is not None:
        return "it is of an expert-parallel group, and only one rank is built"
    if call.x.dtype != torch.bfloat16 or call.y_dtype != torch.bfloat16:
        return f"x is {call.x.dtype} and y {call.y_dtype}, and only torch.bfloat16 is built"
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
    if needs_gradients and call.weight_on == "input":
        return "router weights apply to the input and it needs gradients, which are built for 'output' and 'hidden'"
    return _size_reason(call) or _layout_reason(call)


def _size_reason(call: Call) -> str | None:
    width, inner, choices = call.x.shape[1], call.w_down[0].shape[-2], call.topk_ids.shape[1]
    sizes = {"H": width, "I": inner}
    if call.shared_w_down is not None:
        sizes["the shared expert's width"] = call.shared_w_down.shape[0]
    for what, size in sizes.items():
        if size % UNIT:
            return f"{what} is {size}, and it must be a multiple of {UNIT}"
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
    found = _networks(call, with_address=False)
    return found if isinstance(found, str) else None


def _networks(call: Call, with_address: bool) -> tuple[FirstLayer, Matrices, SharedExpert | None] | str:
    """The first and the second layer of the experts, and the shared expert, or why the kernel cannot read them."""
    first = first_layer(call.w_gate, call.w_up, call.gate_up, with_address=with_address)
    routed = _readable(first, matrices(call.w_down, with_address=with_address))
    if isinstance(routed, str):
        return routed
    shared = _shared(call, with_address)
    return shared if isinstance(shared, str) else (*routed, shared)


def _shared(call: Call, with_address: bool) -> SharedExpert | str | None:
    if call.shared_w_gate is None or call.shared_w_down is None:
        return None
    up = [] if call.shared_w_up is None else [call.shared_w_up[None]]
    first = first_layer([call.shared_w_gate[None]], up, "apart" if up else "gate_up", with_address=with_address)
    network = _readable(first, matrices([call.shared_w_down[None]], with_address=with_address))
    if isinstance(network, str):
        return f"the shared expert: {network}"
    return SharedExpert(network[0].gate, network[0].up, network[1], call.shared_sigmoid)


def _readable(first: FirstLayer | str, down: Matrices | str) -> tuple[FirstLayer, Matrices] | str:
    if isinstance(first, str):
        return first
    if isinstance(down, str):
        return down
    if first.gate.n_major != first.up.n_major:
        return "gate and up are stored in different orders"
    return next((why for one in (first.gate, first.up, down) if (why := one.unreadable())), (first, down))


def run(call: Call, trace: Tensor | None = None) -> Tensor:
    """`mok::moe` of a call that `supports` accepts; `trace` as `forward` takes it.

    Raises RuntimeError for what fake tensors cannot tell: too many tokens, or weights at an odd address.
    """
    x, weights, layer = arguments(call)
    return forward(x, call.topk_ids.contiguous(), weights, layer, timeout=settings.timeout_s, trace=trace)


def run_saving(call: Call) -> tuple[Tensor, Tensor]:
    """`mok::moe_forward`: the same, and the pre-activations of `saved_shape`, unset in rows that no slot has."""
    x, weights, layer = arguments(call)
    saved = x.new_empty(saved_shape(call))
    kept = saved if saved.dim() > 1 else None
    y = forward(x, call.topk_ids.contiguous(), weights, layer, saved=kept, timeout=settings.timeout_s)
    return y, saved


def saved_shape(call: Call) -> tuple[int | torch.SymInt, ...]:
    """[2, rows, I]: gate's and up's outputs of each sorted row, before the activation; [1, rows, I] without a gate.

    [0], for nothing, if they are to be computed again.
    """
    return (0,) if settings.recompute else _pre_activations_shape(call)


def _pre_activations_shape(call: Call) -> tuple[int | torch.SymInt, ...]:
    gated = 2 if call.w_gate else 1
    return gated, rows_of(call.topk_ids.numel(), call.num_experts), call.w_down[0].shape[-2]


def arguments(call: Call) -> tuple[Tensor, Tensor, Layer]:
    """x and the router weights as the kernel reads them, and the layer."""
    if reason := _tokens_reason(call.topk_ids.numel(), call.num_experts):
        raise RuntimeError(f"mok.moe: provider {NAME!r} cannot run this call: {reason}")
    networks = _networks(call, with_address=True)
    if isinstance(networks, str):
        raise RuntimeError(f"mok.moe: provider {NAME!r} cannot run this call: {networks}")
    first, down, shared = networks
    bias = biases(call.b_gate, call.b_up, call.b_down, call.gate_up)
    layer = Layer(
        first,
        down,
        activation(call.activation, call.activation_args),
        Biases(bias.gate, side_by_side(bias.up) if not call.w_gate else bias.up, side_by_side(bias.down)),
        shared,
        call.weight_on,
        None if call.capacity is None else int(call.capacity),
        call.capacity is not None and call.capacity_order == "choice",  # else rows lie in the order of slots
    )
    weights = call.topk_weights.contiguous()
    return _aligned(call.x), weights if weights.dtype in WEIGHT_KINDS else weights.float(), layer


def _aligned(x: Tensor) -> Tensor:
    """x with rows that begin at multiples of 16 bytes, copied if they do not."""
    if x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()


def backward(grad_y: Tensor, call: Call, saved: Tensor | None) -> list[Tensor]:
    """`mok::moe_backward` of a call that `supports` accepts; without `saved` the first layer is computed again."""
    x, weights, layer = arguments(call)
    if saved is None:
        saved = x.new_empty(_pre_activations_shape(call))
        ids = call.topk_ids.contiguous()
        forward(x, ids, weights, layer, saved=saved, only_first=True, timeout=settings.timeout_s)
    grad_y = _aligned(grad_y)
    routed = gradients(grad_y, call, x, weights, layer, saved, timeout=settings.timeout_s)
    if call.shared_w_gate is None or call.shared_w_down is None:
        return routed
    shared = shared_gradients(
        grad_y, x, call.shared_w_gate, call.shared_w_up, call.shared_w_down, call.shared_sigmoid
    )
    return [(routed[0] + shared.x).to(x.dtype), *routed[1:], *shared.weights]


def version() -> str:
    """The kernels' build key, which changes with their sources, and what decides the shape of `saved`."""
    return f"{build.source_key()} {settings.recompute}"
