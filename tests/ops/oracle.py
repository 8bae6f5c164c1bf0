"""An independent statement of the op: each token by itself, each expert as matrices, gradients by autograd.

It shares no code with mokfx.ops, and is written the way a model is: the tests compare the reference with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    *,
    num_experts: int,
    activation: str,
    activation_args: list[float],
    gate_up: str,
    weight_on: str,
    capacity: int | None,
    capacity_order: str,
    out_dtype: torch.dtype | None,
    b_gate: list[Tensor] = [],  # noqa: B006
    b_up: list[Tensor] = [],  # noqa: B006
    b_down: list[Tensor] = [],  # noqa: B006
    shared_w_gate: Tensor | None = None,
    shared_w_up: Tensor | None = None,
    shared_w_down: Tensor | None = None,
    shared_sigmoid: Tensor | None = None,
) -> Tensor:
    """`mok::moe` on one rank."""
    keep = _kept(topk_ids, num_experts, capacity, capacity_order)
    rows = []
    for t in range(x.shape[0]):
        total = 0 * x[t]  # depends on x also if no expert takes the token
        for c in range(topk_ids.shape[1]):
            e = int(topk_ids[t, c])
            if not keep[t][c]:
                continue
            weight = topk_weights[t, c].to(x.dtype)
            row = x[t] * weight if weight_on == "input" else x[t]
            first = [
                row @ _of(w, e, 2) + (_of(b, e, 1) if b else 0)
                for w, b in ((w_gate, b_gate), (w_up, b_up))
                if w
            ]
            hidden = _activate(first, activation, activation_args, gate_up)
            if weight_on == "hidden":
                hidden = hidden * weight
            out = hidden @ _of(w_down, e, 2) + (_of(b_down, e, 1) if b_down else 0)
            total = total + (out * weight if weight_on == "output" else out)
        if shared_w_gate is not None:
            assert shared_w_down is not None
            if shared_w_up is None:
                gate, up = (x[t] @ shared_w_gate).chunk(2)
            else:
                gate, up = x[t] @ shared_w_gate, x[t] @ shared_w_up
            shared = (F.silu(gate) * up) @ shared_w_down
            if shared_sigmoid is not None:
                shared = shared * torch.sigmoid(x[t] @ shared_sigmoid)
            total = total + shared
        rows.append(total)
    return (torch.stack(rows) if rows else x * 1).to(out_dtype or x.dtype)


def _of(layer: list[Tensor], expert: int, dims: int) -> Tensor:
    return layer[0][expert] if layer[0].dim() > dims else layer[expert]


def _activate(first: list[Tensor], name: str, args: list[float], layout: str) -> Tensor:
    if name in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        (z,) = first
        plain: dict[str, Any] = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
            "relu": F.relu,
            "relu_squared": lambda v: F.relu(v).square(),
        }
        return torch.as_tensor(plain[name](z))
    if layout == "apart":
        gate, up = first
    elif layout == "interleaved":
        gate, up = first[0].unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, up = first[0].chunk(2)
        if layout == "up_gate":
            gate, up = up, gate
    if name == "clamped_swiglu":
        alpha, limit = args
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, min=-limit, max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if name == "limited_swiglu":
        (limit,) = args
        return F.silu(torch.clamp(gate, max=limit)) * torch.clamp(up, min=-limit, max=limit)
    curves: dict[str, Any] = {
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "reglu": F.relu,
    }
    return torch.as_tensor(curves[name](gate) * up)


def _kept(ids: Tensor, experts: int, capacity: int | None, order: str) -> list[list[bool]]:
    tokens, choices = ids.shape
    keep = [[int(e) >= 0 for e in row] for row in ids]
    if capacity is None:
        return keep
    taken = [0] * experts
    slots = [(t, c) for t in range(tokens) for c in range(choices)]
    if order == "choice":
        slots = [(t, c) for c in range(choices) for t in range(tokens)]
    for t, c in slots:
        if keep[t][c]:
            e = int(ids[t, c])
            keep[t][c] = taken[e] < capacity
            taken[e] += 1
    return keep
