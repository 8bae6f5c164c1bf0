"""What is timed: ways to compute one layer from the same tensors, and the products all of them need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import forward as hopper
from ..kernels.weights import Matrices, gate_and_up, matrices
from .shapes import Shape

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Layer:
    """Random tensors of a layer: weights stored as nn.Linear stores them, routing by a random router."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor  # [E, H, 2I], gate columns first
    down: Tensor  # [E, I, H]


def make(shape: Shape) -> Layer:
    """Random inputs on the current GPU."""

    def linear(ins: int, outs: int) -> Tensor:
        weight = torch.randn(shape.experts, outs, ins, device="cuda", dtype=torch.bfloat16)
        return weight.mul_(ins**-0.5).transpose(1, 2)

    ids = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.choices).indices
    return Layer(
        torch.randn(shape.tokens, shape.width, device="cuda", dtype=torch.bfloat16),
        ids,
        torch.softmax(torch.randn(shape.tokens, shape.choices, device="cuda"), 1),
        linear(shape.width, 2 * shape.inner),
        linear(shape.inner, shape.width),
    )


def mok(layer: Layer) -> Run:
    """The fused kernel, from ids to y."""
    first, down = gate_and_up([layer.gate_up], [], "gate_up"), matrices([layer.down])
    assert isinstance(first, tuple) and isinstance(down, Matrices), (first, down)
    gate, up = first
    return lambda: hopper.forward(layer.x, layer.ids, layer.weights, gate, up, down)


def _eager(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0, dtype=torch.int32)
    rows = x[order // ids.shape[1]]
    gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
    slots = torch.empty_like(out).index_copy_(0, order, out).view(*ids.shape, -1)
    return (slots.float() * weights[..., None]).sum(1).to(x.dtype)


def eager(layer: Layer) -> Run:
    """Sort, two torch._grouped_mm, activation, unsort, weighted sum: each an op of its own."""
    return lambda: _eager(layer.x, layer.ids, layer.weights, layer.gate_up, layer.down)


def inductor(layer: Layer) -> Run:
    """The same under torch.compile."""
    compiled = torch.compile(_eager, dynamic=False)
    return lambda: compiled(layer.x, layer.ids, layer.weights, layer.gate_up, layer.down)


def grouped_mm(layer: Layer) -> Run:
    """Only the two torch._grouped_mm, on rows already sorted and hidden already made."""
    counts = torch.bincount(layer.ids.flatten(), minlength=layer.gate_up.shape[0])
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = torch.randn(layer.ids.numel(), layer.x.shape[1], device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(layer.ids.numel(), layer.down.shape[1], device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        torch._grouped_mm(rows, layer.gate_up, offs=ends)
        return torch._grouped_mm(hidden, layer.down, offs=ends)

    return run


def cublas(layer: Layer) -> Run:
    """Two dense products of as many operations, all rows by one expert's weights: a ceiling."""
    rows = torch.randn(layer.ids.numel(), layer.x.shape[1], device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(layer.ids.numel(), layer.down.shape[1], device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        rows @ layer.gate_up[0]
        return hidden @ layer.down[0]

    return run


VARIANTS: dict[str, Callable[[Layer], Run]] = {
    "mok": mok,
    "eager": eager,
    "inductor": inductor,
    "grouped_mm": grouped_mm,
    "cublas": cublas,
}
