"""What is timed: ways to compute one layer from the same tensors, and the products that all of them need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mokfx.ops import OP, select, unsupported_reason
from mokfx.ops.exchange import resolve_group

from . import plain
from .errors import Unavailable
from .layer import Layer

Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Step:
    """One call of a variant: the layer's forward or forward and backward.

    Attributes:
        run: makes the call and returns what it computed: y, then with a backward the gradients.
        gradients: of what `run` returned, the gradients by the names of `layer.INPUTS`, in the layer's layouts. None
            if this is only a part of the layer, which has no answer to check.
        note: what a reader of the figure should know.
    """

    run: Callable[[], Outputs]
    gradients: Callable[[Outputs], Mapping[str, Tensor]] | None
    note: str = ""


Make = Callable[[Layer, bool], Step]
"""A variant: a step of a layer, with a backward or without. Raises Unavailable with the reason why not."""


def with_gradients(forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad_y: Tensor) -> Callable[[], Outputs]:
    """A forward and its backward as one call."""

    def run() -> Outputs:
        y = forward()
        return y, *torch.autograd.grad(y, inputs, grad_y)

    return run


def whole_layer(layer: Layer, backward: bool, forward: Callable[[], Tensor]) -> Step:
    """The step of a forward that is differentiable in the layer's own tensors."""
    if not backward:
        return Step(lambda: (forward(),), lambda outputs: {})
    inputs = layer.inputs()
    run = with_gradients(forward, list(inputs.values()), layer.grad_y)
    return Step(run, lambda outputs: dict(zip(inputs, outputs[1:], strict=True)))


def mok(layer: Layer, backward: bool) -> Step:
    """`mok::moe`, by the provider that "auto" picks."""
    call = layer.call()
    if reason := unsupported_reason(call):
        raise Unavailable(reason)
    positional, keywords = call.arguments()
    step = whole_layer(layer, backward, lambda: OP(*positional, **keywords))
    return replace(step, note=f"provider {select(call).name}")


def _plain(compiled: bool) -> Make:
    def make(layer: Layer, backward: bool) -> Step:
        if compiled:
            torch.compiler.reset()  # a layer before this one must not make sizes dynamic
        function = torch.compile(plain.moe) if compiled else plain.moe
        name, tensors = layer.ranks.group_name, plain.arguments(layer)
        group = None if name is None else resolve_group(name)
        return whole_layer(layer, backward, lambda: function(layer.shape, group, **tensors))

    return make


def _local_rows(layer: Layer) -> Tensor:
    """How many rows each of this rank's experts has, of all ranks' tokens."""
    local = layer.down.shape[0]
    counts = layer.ranks.sum(torch.bincount(layer.ids.flatten(), minlength=layer.shape.experts))
    return counts[layer.ranks.rank * local :][:local]


def _products(multiply: Callable[[Tensor, Tensor], Tensor], layer: Layer, backward: bool, rows: int, pick: int) -> Step:
    """Both layers' products, each alone, of random rows."""
    device, dtype = layer.x.device, layer.x.dtype
    pairs, gradients = [], []
    for weight in (layer.gate_up, layer.down):
        left = torch.randn(rows, weight.shape[1], device=device, dtype=dtype, requires_grad=backward)
        right = weight if pick < 0 else weight.detach()[pick].requires_grad_(backward)
        pairs.append((left, right))
        gradients.append(torch.randn(rows, weight.shape[2], device=device, dtype=dtype) if backward else None)

    def run() -> Outputs:
        outputs = [multiply(left, right) for left, right in pairs]
        if not backward:
            return outputs
        return torch.autograd.grad(outputs, [tensor for pair in pairs for tensor in pair], gradients)

    return Step(run, None)


def grouped_mm(layer: Layer, backward: bool) -> Step:
    """Only the `torch._grouped_mm` products, on rows already sorted and hidden already made."""
    counts = _local_rows(layer)
    ends = counts.cumsum(0, dtype=torch.int32)
    return _products(
        lambda rows, weights: torch._grouped_mm(rows, weights, offs=ends), layer, backward, int(ends[-1]), -1
    )


def cublas(layer: Layer, backward: bool) -> Step:
    """Dense products of as many operations, all rows by one expert's weights."""
    return _products(torch.mm, layer, backward, layer.ids.numel(), 0)


VARIANTS: dict[str, Make] = {
    "eager": _plain(compiled=False),
    "inductor": _plain(compiled=True),
    "mok": mok,
    "grouped_mm": grouped_mm,
    "cublas": cublas,
}
