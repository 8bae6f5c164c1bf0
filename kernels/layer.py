"""One MoE layer as the kernels take it: where its weights lie, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .activation import NO_BIASES, SWIGLU, Activation, Biases
from .weights import BLOCKS, FirstLayer, Matrices


@dataclass(frozen=True)
class SharedExpert:
    """SwiGLU of its own width for every token: [H, S], [H, S] and [S, H]; `sigmoid` [H, 1] or None."""

    gate: Matrices
    up: Matrices
    down: Matrices
    sigmoid: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """One layer's networks and settings, as the kernel takes them."""

    first: FirstLayer
    down: Matrices
    act: Activation = SWIGLU
    bias: Biases = NO_BIASES
    shared: SharedExpert | None = None
    weight_on: str = "output"
    capacity: int | None = None
    by_choice: bool = False

    @property
    def inner(self) -> int:
        """I."""
        return self.down.rows

    @property
    def shared_inner(self) -> int:
        """Width of the shared expert, 0 if there is none."""
        return self.shared.down.rows if self.shared else 0

    @property
    def plain(self) -> bool:
        """SwiGLU without biases, for which there are kernels of their own."""
        sigmoid = self.shared is not None and self.shared.sigmoid is not None
        special = self.bias.present or sigmoid or self.weight_on != "output" or self.first.kind != BLOCKS
        return self.act == SWIGLU and not special

    @property
    def n_major(self) -> int:
        """`n_major` of layout.cuh."""
        bits = self.first.gate.n_major | self.down.n_major << 1
        if self.shared:
            bits |= self.shared.gate.n_major << 2 | self.shared.down.n_major << 3
        return bits
