"""Models for the tests of `mokfx.check`, and factories of them for its command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import mokfx
from mokfx.demo_model import MoE

HIDDEN, EXPERTS = 32, 4


class Layer(nn.Module):
    """An MoE layer with a buffer that counts its calls, on [T, H]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        group = dist.group.WORLD if dist.is_initialized() else None
        self.moe = MoE(HIDDEN, 48, EXPERTS, 2, group).to(dtype)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.moe(x)


def layer(dtype: torch.dtype = torch.float32) -> Layer:
    torch.manual_seed(0)
    return Layer(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def compiled(model: nn.Module) -> nn.Module:
    """Without Inductor, which takes seconds."""
    return mokfx.compile(model, options={"mok.compiler": "aot_eager"})


def good() -> tuple[nn.Module, tuple[Tensor]]:
    return compiled(layer(torch.bfloat16)), (tokens(torch.bfloat16),)


def without_moe() -> tuple[nn.Module, tuple[Tensor]]:
    return compiled(nn.Linear(4, 4)), (torch.ones(2, 4),)


def fails() -> tuple[nn.Module, tuple[Tensor]]:
    return layer(), (torch.ones(2, HIDDEN + 1),)


def fails_compiled() -> tuple[nn.Module, tuple[Tensor]]:
    return torch.compile(layer(), backend=broken), (tokens(),)  # type: ignore[return-value]


def broken(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise NotImplementedError("not today")
