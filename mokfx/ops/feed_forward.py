"""One two-layer network on its rows: forward, and the gradients written out.

Rows and weights are of the input dtype. A product's operands are widened, so that it accumulates in the wide
dtype, and is not rounded, on every device; `rounded` marks where a value is cut to the input dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mokfx.ops.activations import ACTIVATIONS
from mokfx.ops.arguments import FeedForward


@dataclass(frozen=True)
class Trace:
    """What the backward needs of a forward; all wide but `rows`, with n rows."""

    rows: Tensor
    gate: Tensor | None
    up: Tensor
    activated: Tensor
    """act(gate, up), before it is weighted and rounded."""
    hidden: Tensor


@dataclass(frozen=True)
class RowGradients:
    """Gradients at the network's rows, all wide: `[n, H]`, twice `[n, I]`, and `[n]`."""

    rows: Tensor
    gate: Tensor | None
    up: Tensor
    hidden_weight: Tensor | None


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` cut to the precision of `dtype`, in their own dtype."""
    return values.to(dtype).to(values.dtype)


def forward(network: FeedForward, rows: Tensor, hidden_weight: Tensor | None = None) -> tuple[Tensor, Trace]:
    """The network's output for `rows` `[n, H]`, wide `[n, H]` and not rounded.

    `hidden_weight` `[n]`, wide, multiplies the activated rows.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    inputs = rows.to(wide)
    gate = None if network.gate is None else _affine(inputs, network.gate, network.gate_bias)
    up = _affine(inputs, network.up, network.up_bias)
    activated = ACTIVATIONS[network.activation].value(gate, up, network.activation_args)
    weighted = activated if hidden_weight is None else activated * hidden_weight[:, None]
    hidden = rounded(weighted, rows.dtype)
    return _affine(hidden, network.down, network.down_bias), Trace(inputs, gate, up, activated, hidden)


def backward(
    network: FeedForward, trace: Trace, d_output: Tensor, hidden_weight: Tensor | None = None
) -> RowGradients:
    """The gradients at the rows, from `d_output` `[n, H]`, wide and rounded to the input dtype."""
    wide, dtype = d_output.dtype, network.down.dtype
    d_hidden = d_output @ network.down.to(wide).t()
    d_weight = None
    if hidden_weight is not None:
        d_weight = (d_hidden * trace.activated).sum(1)
        d_hidden = d_hidden * hidden_weight[:, None]
    d_gate, d_up = ACTIVATIONS[network.activation].derivative(
        trace.gate, trace.up, network.activation_args, d_hidden
    )
    d_up = rounded(d_up, dtype)
    d_rows = d_up @ network.up.to(wide).t()
    if d_gate is not None and network.gate is not None:
        d_gate = rounded(d_gate, dtype)
        d_rows = d_gate @ network.gate.to(wide).t() + d_rows
    return RowGradients(d_rows, d_gate, d_up, d_weight)


def write_weight_gradients(into: FeedForward, trace: Trace, d_output: Tensor, at: RowGradients) -> None:
    """Fill `into`, views of gradient buffers laid out as the weights, from what `backward` took and gave."""
    into.down.copy_(trace.hidden.t() @ d_output)
    into.up.copy_(trace.rows.t() @ at.up)
    if into.down_bias is not None:
        into.down_bias.copy_(d_output.sum(0))
    if into.up_bias is not None:
        into.up_bias.copy_(at.up.sum(0))
    if into.gate is not None and at.gate is not None:
        into.gate.copy_(trace.rows.t() @ at.gate)
        if into.gate_bias is not None:
            into.gate_bias.copy_(at.gate.sum(0))


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = rows @ weight.to(rows.dtype)
    return product if bias is None else product + bias.to(rows.dtype)
