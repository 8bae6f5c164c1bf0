"""What a recognised MoE layer is: the tensors that the op takes and the settings that say how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mokfx.passes.bijections import Exchange
from mokfx.passes.terms import Size, Term
from mokfx.passes.value import Leaf, Stack


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph as the layer reads it."""

    leaf: Leaf | Stack
    index: tuple[Term, ...]
    casts: tuple[torch.dtype, ...] = ()
    scale: float = 1.0
    picked: bool = False
    """Whether it has a number for each expert, of which a choice's own is read."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.leaf.leaves if isinstance(self.leaf, Stack) else (self.leaf,)

    @property
    def dtype(self) -> torch.dtype:
        return self.casts[-1] if self.casts else self.leaves[0].tensor.dtype


@dataclass(frozen=True)
class Matrix:
    """An expert's matrix [inputs, outputs] or vector [outputs], in the order in which its tensor stores it."""

    operand: Operand
    expert: Term | None
    inputs: Term | None
    outputs: Term


@dataclass(frozen=True)
class Network:
    """A feed-forward network: `activation(x @ gate, x @ up) @ down`, or without a gate."""

    activation: str
    arguments: tuple[float, ...]
    gate: Matrix | None
    up: Matrix | None
    down: Matrix
    gate_bias: Matrix | None = None
    up_bias: Matrix | None = None
    down_bias: Matrix | None = None
    layout: str = "apart"

    def matrices(self) -> Iterator[Matrix]:
        for matrix in (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias):
            if matrix is not None:
                yield matrix


@dataclass(frozen=True)
class Capacity:
    limit: Term
    order: str


@dataclass(frozen=True)
class Layer:
    """The MoE of x."""

    x: Operand
    ids: Operand
    weights: Operand | None
    weight_on: str
    network: Network
    num_experts: Size
    top_k: Size
    hidden: Size
    intermediate: Size
    group: str | None = None
    ranks: int = 1
    exchange: Exchange | None = None
    capacity: Capacity | None = None
    shared: Network | None = None
    shared_gate: Matrix | None = None
    clip_ids: bool = False
    """Whether ids outside the experts mean a slot that nothing computes."""

    def with_shared(self, network: Network, gate: Matrix | None) -> Layer:
        return replace(self, shared=network, shared_gate=gate)

    def operands(self) -> Iterator[Operand]:
        """Every tensor that the op will be given."""
        yield self.x
        yield self.ids
        if self.weights is not None:
            yield self.weights
        for network in (self.network, self.shared):
            if network is not None:
                for matrix in network.matrices():
                    yield matrix.operand
        if self.shared_gate is not None:
            yield self.shared_gate.operand
