"""The shared expert of the reference: every token passes through it, on its own rank.

How tokens are divided among ranks must not change a token's bits, but a CPU product may round a row
differently with the number of rows and, for widths that are no multiples of 4, with the row's place. So rows
go through in blocks of one size, and widths are padded with zeros, which change no sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mokfx.ops import feed_forward
from mokfx.ops.arguments import Call, FeedForward
from mokfx.ops.feed_forward import RowGradients, Trace, rounded

_ROWS = 32
_WIDTH = 16


def forward(call: Call) -> Tensor | None:
    """Its output for every token, `[T, H]`, wide, rounded to x's dtype; None if there is no shared expert."""
    network = call.shared()
    if network is None:
        return None
    network, sigmoid = _padded(network), _padded_sigmoid(call)
    blocks = []
    for rows in _blocks(call.x):
        output, trace = feed_forward.forward(network, rows)
        blocks.append(output if sigmoid is None else output * _gate(trace.rows, sigmoid))
    return rounded(_unblock(blocks, call), call.x.dtype)


def backward(call: Call, d_y: Tensor, gradients: Call) -> Tensor | None:
    """Fills its weights' gradients in `gradients`; returns that of x, `[T, H]`, wide, rounded to x's dtype.

    `d_y` is `[T, H]`, wide. None if there is no shared expert.
    """
    network, into = call.shared(), gradients.shared()
    if network is None or into is None:
        return None
    # The weights' gradients are sums over this rank's tokens alone: nothing to keep apart, so one block.
    whole = _backward(network, call.shared_sigmoid, call.x, d_y)
    feed_forward.write_weight_gradients(into, whole.trace, whole.d_output, whole.at)
    if gradients.shared_sigmoid is not None and whole.d_logit is not None:
        gradients.shared_sigmoid.copy_(whole.trace.rows.t() @ whole.d_logit)
    network, sigmoid = _padded(network), _padded_sigmoid(call)
    blocks = [
        _backward(network, sigmoid, rows, d_rows).d_x
        for rows, d_rows in zip(_blocks(call.x), _blocks(d_y), strict=True)
    ]
    return rounded(_unblock(blocks, call), call.x.dtype)


@dataclass(frozen=True)
class _Backward:
    d_x: Tensor
    d_output: Tensor
    d_logit: Tensor | None
    """`[n, 1]`: gradient of the sigmoid's argument."""
    trace: Trace
    at: RowGradients


def _backward(network: FeedForward, sigmoid: Tensor | None, rows: Tensor, d_y: Tensor) -> _Backward:
    output, trace = feed_forward.forward(network, rows)
    gate = d_logit = None
    if sigmoid is not None:
        gate = _gate(trace.rows, sigmoid)
        d_logit = rounded((d_y * output).sum(1, keepdim=True) * gate * (1 - gate), rows.dtype)
    d_output = rounded(d_y if gate is None else d_y * gate, rows.dtype)
    at = feed_forward.backward(network, trace, d_output)
    d_x = at.rows if sigmoid is None or d_logit is None else at.rows + d_logit * sigmoid[:, 0].to(d_y.dtype)
    return _Backward(d_x, d_output, d_logit, trace, at)


def _gate(rows: Tensor, sigmoid: Tensor) -> Tensor:
    """`[n, 1]`: what multiplies the output. `sigmoid` may have zero columns for padding after its first."""
    return torch.sigmoid(rows @ sigmoid.to(rows.dtype))[:, :1]


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """`rows` `[T, H]` in blocks of `_ROWS` padded rows, at least one."""
    missing = -rows.shape[0] % _ROWS if rows.shape[0] else _ROWS
    blocks = pad(rows, (0, -rows.shape[1] % _WIDTH, 0, missing)).split(_ROWS)
    return tuple(block.clone() for block in blocks)  # its own memory: alignment may steer a product as well


def _unblock(blocks: list[Tensor], call: Call) -> Tensor:
    return torch.cat(blocks)[: call.x.shape[0], : call.x.shape[1]]


def _padded(network: FeedForward) -> FeedForward:
    assert network.gate is not None
    return replace(
        network, gate=_pad_matrix(network.gate), up=_pad_matrix(network.up), down=_pad_matrix(network.down)
    )


def _padded_sigmoid(call: Call) -> Tensor | None:
    return None if call.shared_sigmoid is None else _pad_matrix(call.shared_sigmoid)


def _pad_matrix(matrix: Tensor) -> Tensor:
    return pad(matrix, (0, -matrix.shape[1] % _WIDTH, 0, -matrix.shape[0] % _WIDTH))
