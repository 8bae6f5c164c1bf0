"""The activations between an expert's two layers: value and derivative, elementwise and wide.

A gated activation takes the rows of both parts of the first layer, gate and up; any other takes `up` and gets
None for `gate`. At a kink the derivative is the one that torch's own function has there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Args = Sequence[float]


@dataclass(frozen=True)
class Activation:
    """`value(gate, up, args)` is the activated rows; `derivative(gate, up, args, d)` is (d_gate, d_up)."""

    gated: bool
    value: Callable[[Tensor | None, Tensor, Args], Tensor]
    derivative: Callable[[Tensor | None, Tensor, Args, Tensor], tuple[Tensor | None, Tensor]]
    arguments: tuple[str, ...] = ()
    """Names of what `activation_args` must hold."""


Curve = Callable[[Tensor], Tensor]


def silu(z: Tensor) -> Tensor:
    """z * sigmoid(z)."""
    return z * torch.sigmoid(z)


def silu_slope(z: Tensor) -> Tensor:
    """Derivative of `silu`."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def gelu(z: Tensor) -> Tensor:
    """z * Phi(z), Phi the normal distribution function."""
    return z * 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))


def gelu_slope(z: Tensor) -> Tensor:
    """Derivative of `gelu`."""
    density = torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * density


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def gelu_tanh(z: Tensor) -> Tensor:
    """The tanh approximation of `gelu`."""
    return 0.5 * z * (1 + torch.tanh(_TANH_SCALE * (z + _TANH_CUBE * z * z * z)))


def gelu_tanh_slope(z: Tensor) -> Tensor:
    """Derivative of `gelu_tanh`."""
    t = torch.tanh(_TANH_SCALE * (z + _TANH_CUBE * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * z * z)


def relu_slope(z: Tensor) -> Tensor:
    """Derivative of relu, 0 at 0."""
    return (z > 0).to(z.dtype)


def relu_squared(z: Tensor) -> Tensor:
    """relu(z) squared."""
    return torch.relu(z) * torch.relu(z)


def relu_squared_slope(z: Tensor) -> Tensor:
    """Derivative of `relu_squared`."""
    return 2 * torch.relu(z)


def _plain(curve: Curve, slope: Curve) -> Activation:
    return Activation(
        gated=False,
        value=lambda gate, up, args: curve(up),
        derivative=lambda gate, up, args, d: (None, d * slope(up)),
    )


def _gated(curve: Curve, slope: Curve) -> Activation:
    def value(gate: Tensor | None, up: Tensor, args: Args) -> Tensor:
        assert gate is not None
        return curve(gate) * up

    def derivative(gate: Tensor | None, up: Tensor, args: Args, d: Tensor) -> tuple[Tensor, Tensor]:
        assert gate is not None
        return d * up * slope(gate), d * curve(gate)

    return Activation(True, value, derivative)


def _clamped_value(gate: Tensor | None, up: Tensor, args: Args) -> Tensor:
    assert gate is not None
    alpha, limit = args
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _clamped_derivative(gate: Tensor | None, up: Tensor, args: Args, d: Tensor) -> tuple[Tensor, Tensor]:
    assert gate is not None
    alpha, limit = args
    gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * gate)
    d_gate = d * (up + 1) * s * (1 + alpha * gate * (1 - s))
    return d_gate * gate_passes, d * gate * s * up_passes


def _limited_value(gate: Tensor | None, up: Tensor, args: Args) -> Tensor:
    assert gate is not None
    (limit,) = args
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _limited_derivative(gate: Tensor | None, up: Tensor, args: Args, d: Tensor) -> tuple[Tensor, Tensor]:
    assert gate is not None
    (limit,) = args
    gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return d * up * silu_slope(gate) * gate_passes, d * silu(gate) * up_passes


ACTIVATIONS = {
    "swiglu": _gated(silu, silu_slope),
    "geglu": _gated(gelu, gelu_slope),
    "geglu_tanh": _gated(gelu_tanh, gelu_tanh_slope),
    "reglu": _gated(torch.relu, relu_slope),
    "clamped_swiglu": Activation(True, _clamped_value, _clamped_derivative, ("alpha", "limit")),
    "limited_swiglu": Activation(True, _limited_value, _limited_derivative, ("limit",)),
    "silu": _plain(silu, silu_slope),
    "gelu": _plain(gelu, gelu_slope),
    "gelu_tanh": _plain(gelu_tanh, gelu_tanh_slope),
    "relu": _plain(torch.relu, relu_slope),
    "relu_squared": _plain(relu_squared, relu_squared_slope),
}
"""Every activation that `mok::moe` knows, by its name in the schema."""
