"""The gradients of the shared expert: a dense network of all tokens, so they are products for cuBLAS.

The kernel's launch leaves them out: nothing in them is sorted, gathered or exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedGradients:
    """`x` [T, H] in float32; the others as the op orders them."""

    x: Tensor
    weights: list[Tensor]


def shared_gradients(
    grad_y: Tensor, x: Tensor, gate_up: Tensor, up: Tensor | None, down: Tensor, sigmoid: Tensor | None
) -> SharedGradients:
    """Of `sigmoid(x @ sigmoid) * (silu(x @ gate) * (x @ up)) @ down`, from grad_y [T, H].

    All are bf16: `gate_up` [H, S] beside `up` [H, S], or [H, 2S] with the gate first and `up` None; `down` [S, H];
    `sigmoid` [H, 1] or None. Each gradient has the strides of what it belongs to. Products accumulate in float32; pre-
    activations, hidden rows and what comes back through them are rounded to bf16, as in eager code.
    """
    dtype, width = x.dtype, down.shape[0]
    first, second = (gate_up, up) if up is not None else (gate_up[:, :width], gate_up[:, width:])
    g, u = (x @ first).float(), (x @ second).float()
    s = torch.sigmoid(g)
    hidden = (g * s * u).to(dtype)
    d_output, d_logit = grad_y, None
    if sigmoid is not None:
        scale = torch.sigmoid(x.float() @ sigmoid.float())
        output = (hidden @ down).float()
        d_logit = ((grad_y.float() * output).sum(1, keepdim=True) * scale * (1 - scale)).to(dtype)
        d_output = (grad_y.float() * scale).to(dtype)
    d_hidden = (d_output @ down.t()).float()
    d_gate = (d_hidden * u * s * (1 + g * (1 - s))).to(dtype)
    d_up = (d_hidden * g * s).to(dtype)
    d_x = (d_gate @ first.t()).float() + (d_up @ second.t()).float()
    d_first = torch.empty_like(gate_up)
    if up is None:
        weights = [d_first]
        _product(x, d_gate, d_first[:, :width])
        _product(x, d_up, d_first[:, width:])
    else:
        weights = [_product(x, d_gate, d_first), _product(x, d_up, torch.empty_like(up))]
    weights.append(_product(hidden, d_output, torch.empty_like(down)))
    if sigmoid is not None and d_logit is not None:
        d_x += d_logit.float() * sigmoid[:, 0].float()
        weights.append(_product(x, d_logit, torch.empty_like(sigmoid)))
    return SharedGradients(d_x, weights)


def _product(rows: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
    """`rows.t() @ gradient` into `out`, in whichever order it is stored."""
    if out.stride(0) == 1 and out.stride(1) != 1:
        torch.mm(gradient.t(), rows, out=out.t())
    else:
        torch.mm(rows.t(), gradient, out=out)
    return out
