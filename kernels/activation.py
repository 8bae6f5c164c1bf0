"""Activations and biases as the kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .driver import Bias


@dataclass(frozen=True)
class Activation:
    """g sigmoid(g (linear + cubic g^2)) (u + offset), with g at most `limit` and u within it."""

    linear: float = 1.0
    cubic: float = 0.0
    limit: float = float("inf")
    offset: float = 0.0


SWIGLU = Activation()


def activation(name: str, arguments: Sequence[float]) -> Activation | None:
    """The op's activation of that name, None if the kernel has not got it."""
    if name == "swiglu":
        return SWIGLU
    if name == "geglu_tanh":  # 1 + tanh(z) = 2 sigmoid(2 z)
        scale = 2 * (2 / torch.pi) ** 0.5
        return Activation(linear=scale, cubic=scale * 0.044715)
    if name == "clamped_swiglu":
        alpha, limit = arguments
        return Activation(linear=alpha, limit=limit, offset=1.0)
    return None


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


def packed(bias: Tensor | None) -> Bias:
    """A bias as the kernel's argument."""
    if bias is None:
        return Bias(None, 0, 0)
    return Bias(bias.data_ptr(), bias.stride(0), bias.stride(1))
