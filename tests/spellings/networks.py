"""What an expert computes between its products: how a fused product is split, and the activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA, LIMIT = 1.702, 1.5

_silu = nn.SiLU()
_gelu = nn.GELU()


def _inplace_product(g: Tensor, u: Tensor) -> Tensor:
    h = F.silu(g)
    h *= u
    return h


def _method_product(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g).mul_(u)


def gelu_erf(h: Tensor) -> Tensor:
    """As it stands in the paper."""
    return 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))


def clamped(g: Tensor, u: Tensor) -> Tensor:
    """gpt-oss."""
    g = g.clamp(min=None, max=LIMIT)
    u = u.clamp(min=-LIMIT, max=LIMIT)
    return (u + 1) * (g * torch.sigmoid(g * ALPHA))


def limited(g: Tensor, u: Tensor) -> Tensor:
    """DeepSeek-V4."""
    return F.silu(g.clamp(max=LIMIT)) * u.clamp(min=-LIMIT, max=LIMIT)


def clamped_minimum(g: Tensor, u: Tensor) -> Tensor:
    g = torch.clamp(g, max=LIMIT)
    u = torch.clamp(u, -LIMIT, LIMIT)
    return g * torch.sigmoid(ALPHA * g) * (u + 1.0)


GATED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu_mul": ("swiglu", lambda g, u: F.silu(g) * u),
    "mul_silu": ("swiglu", lambda g, u: u * F.silu(g)),
    "module_silu": ("swiglu", lambda g, u: _silu(g) * u),
    "torch_silu": ("swiglu", lambda g, u: torch.mul(torch.nn.functional.silu(g), u)),
    "sigmoid_mul": ("swiglu", lambda g, u: g * torch.sigmoid(g) * u),
    "sigmoid_last": ("swiglu", lambda g, u: (g * u) * g.sigmoid()),
    "silu_imul": ("swiglu", _inplace_product),
    "silu_mul_": ("swiglu", _method_product),
    "gelu_mul": ("geglu", lambda g, u: F.gelu(g) * u),
    "module_gelu": ("geglu", lambda g, u: u * _gelu(g)),
    "gelu_erf_mul": ("geglu", lambda g, u: gelu_erf(g) * u),
    "gelu_tanh_mul": ("geglu_tanh", lambda g, u: F.gelu(g, approximate="tanh") * u),
    "relu_mul": ("reglu", lambda g, u: F.relu(g) * u),
    "clamped": ("clamped_swiglu", clamped),
    "clamped_minimum": ("clamped_swiglu", clamped_minimum),
    "limited": ("limited_swiglu", limited),
}
"""Spelling to the activation's name in the field, and the function of gate and up."""

UNGATED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gelu": ("gelu", F.gelu),
    "gelu_module": ("gelu", lambda h: _gelu(h)),
    "gelu_erf": ("gelu", lambda h: gelu_erf(h)),
    "gelu_tanh": ("gelu_tanh", lambda h: F.gelu(h, approximate="tanh")),
    "relu": ("relu", F.relu),
    "relu_method": ("relu", lambda h: h.relu()),
    "relu_inplace": ("relu", lambda h: h.relu_()),
    "relu_clamp": ("relu", lambda h: h.clamp(min=0)),
    "relu_squared": ("relu_squared", lambda h: F.relu(h).square()),
    "relu_pow": ("relu_squared", lambda h: torch.relu(h) ** 2),
    "silu": ("silu", F.silu),
}
"""The same for two-layer networks without a gate."""

EXACT: dict[str, Callable[..., Tensor]] = {
    "swiglu": lambda g, u: g * g.sigmoid() * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "geglu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "reglu": lambda g, u: g.clamp(min=0) * u,
    "clamped_swiglu": lambda g, u: (
        g.clamp(max=LIMIT) * (ALPHA * g.clamp(max=LIMIT)).sigmoid() * (u.clamp(-LIMIT, LIMIT) + 1)
    ),
    "limited_swiglu": lambda g, u: g.clamp(max=LIMIT) * g.clamp(max=LIMIT).sigmoid() * u.clamp(-LIMIT, LIMIT),
    "gelu": lambda h: F.gelu(h),
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": lambda h: h.clamp(min=0),
    "relu_squared": lambda h: h.clamp(min=0) * h.clamp(min=0),
    "silu": lambda h: h * h.sigmoid(),
}
"""The oracle's activations, by name."""

SPLIT: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk": lambda p: p.chunk(2, dim=-1),
    "torch_chunk": lambda p: torch.chunk(p, 2, -1),
    "split": lambda p: p.split(p.shape[-1] // 2, dim=-1),
    "slice": lambda p: (p[..., : p.shape[-1] // 2], p[..., p.shape[-1] // 2 :]),
    "tensor_split": lambda p: torch.tensor_split(p, 2, dim=-1),
    "unflatten": lambda p: p.unflatten(-1, (2, -1)).unbind(-2),
    "narrow": lambda p: (p.narrow(-1, 0, p.shape[-1] // 2), p.narrow(-1, p.shape[-1] // 2, p.shape[-1] // 2)),
    "interleaved": lambda p: (p[..., ::2], p[..., 1::2]),
    "interleaved_view": lambda p: p.unflatten(-1, (-1, 2)).unbind(-1),
}
"""A fused product [n, 2 * I] to its two halves."""
INTERLEAVED = {"interleaved", "interleaved_view"}
