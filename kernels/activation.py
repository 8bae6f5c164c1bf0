"""Activations and biases as the kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .driver import Bias

SIGMOID, GAUSS, RELU, RELU_SQUARED = range(4)
"""`Curve` of layout.cuh."""


@dataclass(frozen=True)
class Activation:
    """curve(g) (u + offset), with g at most `limit` and u within it; curve(u) alone if it is not gated.

    The curve `SIGMOID` is z sigmoid(z (linear + cubic z^2)).
    """

    curve: int = SIGMOID
    linear: float = 1.0
    cubic: float = 0.0
    limit: float = float("inf")
    offset: float = 0.0
    gated: bool = True


_TANH = 2 * (2 / torch.pi) ** 0.5  # 1 + tanh(z) = 2 sigmoid(2 z)
SWIGLU = Activation()
_ACTIVATIONS = {
    "swiglu": SWIGLU,
    "geglu": Activation(GAUSS),
    "geglu_tanh": Activation(linear=_TANH, cubic=_TANH * 0.044715),
    "reglu": Activation(RELU),
    "silu": Activation(gated=False),
    "gelu": Activation(GAUSS, gated=False),
    "gelu_tanh": Activation(linear=_TANH, cubic=_TANH * 0.044715, gated=False),
    "relu": Activation(RELU, gated=False),
    "relu_squared": Activation(RELU_SQUARED, gated=False),
}


def activation(name: str, arguments: Sequence[float]) -> Activation:
    """The op's activation of that name."""
    if name == "clamped_swiglu":
        alpha, limit = arguments
        return Activation(linear=alpha, limit=limit, offset=1.0)
    if name == "limited_swiglu":
        (limit,) = arguments
        return Activation(limit=limit)
    return _ACTIVATIONS[name]


@dataclass(frozen=True)
class Biases:
    """Of gate, up and down: [E, columns] each, or None. They must live as long as the launch."""

    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None

    @property
    def present(self) -> bool:
        """There is any bias."""
        return any(bias is not None for bias in (self.gate, self.up, self.down))


NO_BIASES = Biases()


def stacked_bias(biases: Sequence[Tensor] | None) -> Tensor | None:
    """[E, columns] of one such tensor or of E vectors, which are copied together; None if there is none."""
    if not biases:
        return None
    return biases[0] if biases[0].dim() == 2 else torch.stack(list(biases))


def biases(
    gate: Sequence[Tensor] | None, up: Sequence[Tensor] | None, down: Sequence[Tensor] | None, layout: str
) -> Biases:
    """The biases of a call, gate and up apart for every layout of the op."""
    first, second = stacked_bias(gate), stacked_bias(up)
    if first is not None and layout != "apart":
        half = first.shape[1] // 2
        if layout == "interleaved":
            first, second = first[:, 0::2], first[:, 1::2]
        else:
            first, second = first[:, :half], first[:, half:]
            if layout == "up_gate":
                first, second = second, first
    return Biases(first, second, stacked_bias(down))


def side_by_side(bias: Tensor | None) -> Tensor | None:
    """The bias with its columns side by side, copied if they are not."""
    return bias if bias is None or bias.stride(1) == 1 else bias.contiguous()


def packed(bias: Tensor | None) -> Bias:
    """A bias as the kernel's argument."""
    if bias is None:
        return Bias(None, 0, 0)
    return Bias(bias.data_ptr(), bias.stride(0), bias.stride(1))
