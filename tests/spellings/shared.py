"""Shared experts: a network that every token passes, added to the routed sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shared(nn.Module):
    def __init__(self, hidden: int, width: int, spelling: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.spelling = spelling
        if spelling.startswith("stored"):
            self.w1 = nn.Parameter(torch.randn(hidden, width, dtype=dtype) / hidden**0.5)
            self.w3 = nn.Parameter(torch.randn(hidden, width, dtype=dtype) / hidden**0.5)
            self.w2 = nn.Parameter(torch.randn(width, hidden, dtype=dtype) / width**0.5)
        elif spelling.startswith("fused"):
            self.gate_up = nn.Linear(hidden, 2 * width, bias=False, dtype=dtype)
            self.down = nn.Linear(width, hidden, bias=False, dtype=dtype)
        else:
            self.gate = nn.Linear(hidden, width, bias=False, dtype=dtype)
            self.up = nn.Linear(hidden, width, bias=False, dtype=dtype)
            self.down = nn.Linear(width, hidden, bias=False, dtype=dtype)
        if spelling.endswith("sigmoid"):
            self.sigmoid_gate = nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling.startswith("stored"):
            y = (F.silu(x @ self.w1) * (x @ self.w3)) @ self.w2
        elif self.spelling.startswith("fused"):
            g, u = self.gate_up(x).chunk(2, dim=-1)
            y = self.down(u * F.silu(g))
        else:
            y = self.down(F.silu(self.gate(x)) * self.up(x))
        if self.spelling == "linear_sigmoid":
            y = torch.sigmoid(self.sigmoid_gate(x)) * y
        elif self.spelling.endswith("sigmoid"):
            y = y * self.sigmoid_gate(x).sigmoid()
        return y


def _add_(y: Tensor, shared: Tensor) -> Tensor:
    y += shared
    return y


ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "after": lambda y, shared: y + shared,
    "before": lambda y, shared: torch.add(shared, y),
    "in_place": _add_,
}
"""How the shared output joins; "into" is the fourth: the slots are accumulated into it."""
SHARED = ("linear", "fused", "stored", "linear_sigmoid", "fused_sigmoid", "stored_sigmoid")
