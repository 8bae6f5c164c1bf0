"""The gradients of a call of `mok::moe`, in the op's order and in the layouts of what they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backward import backward, empty_like_weights
from .layer import Layer
from .weights import INTERLEAVED, FirstLayer, Matrices, first_layer, matrices

if TYPE_CHECKING:  # kernels depends on nothing of mokfx at run time
    from mokfx.ops.arguments import Call


def gradients(
    grad_y: Tensor,
    call: Call,
    x: Tensor,
    topk_weights: Tensor,
    layer: Layer,
    saved: Tensor,
    *,
    timeout: float = 60.0,
) -> list[Tensor]:
    """What `mok::moe_backward` returns for a call without a shared expert.

    `x`, `topk_weights` and `layer` are the call's as the kernel reads them, `saved` what its forward kept.
    """
    d_gate, d_up, d_down = (empty_like_weights(one) for one in (call.w_gate, call.w_up, call.w_down))
    first, down = first_layer(d_gate, d_up, call.gate_up), matrices(d_down)
    assert isinstance(first, FirstLayer) and isinstance(down, Matrices), "buffers lie as the weights do"
    ids = call.topk_ids.contiguous()
    done = backward(grad_y, x, ids, topk_weights, layer, saved, first, down, timeout=timeout)
    biases = []
    for name, one in (("gate", call.b_gate), ("up", call.b_up), ("down", call.b_down)):
        if one:
            value = done.down_bias if name == "down" else _first_bias(done.first_bias, name, call, layer.first.kind)
            assert value is not None, "a bias has a gradient"
            biases += [value] if one[0].dim() == 2 else list(value.unbind(0))
    return [done.x, done.topk_weights.to(call.topk_weights.dtype), *d_gate, *d_up, *d_down, *biases]


def _first_bias(bias: Tensor | None, name: str, call: Call, kind: int) -> Tensor | None:
    """The gradient of one bias of the first layer, from that of gate and beside it up."""
    if bias is None or not call.w_gate or kind == INTERLEAVED or call.gate_up == "gate_up":
        return bias
    gate, up = bias.chunk(2, 1)
    if call.gate_up == "apart":
        return (gate if name == "gate" else up).contiguous()
    return torch.cat([up, gate], 1) if call.gate_up == "up_gate" else torch.stack([gate, up], 2).flatten(1)
