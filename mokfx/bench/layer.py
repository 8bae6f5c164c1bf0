"""The tensors of one layer on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mokfx.ops import Call

from .ranks import Ranks
from .shapes import Shape

INPUTS = (
    "x",
    "weights",
    "gate_up",
    "down",
    "gate_up_bias",
    "down_bias",
    "shared_gate_up",
    "shared_down",
)
"""The layer's tensors that have gradients, in the order of the op."""


@dataclass(frozen=True)
class Layer:
    """Random bf16 tensors of a layer; `experts` are those of this rank, E/R of E."""

    shape: Shape
    ranks: Ranks
    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int64
    weights: Tensor  # [T, k] float32
    gate_up: Tensor  # [E/R, H, 2I]
    down: Tensor  # [E/R, I, H]
    grad_y: Tensor  # [T, H]
    gate_up_bias: Tensor | None = None  # [E/R, 2I]
    down_bias: Tensor | None = None  # [E/R, H]
    shared_gate_up: Tensor | None = None  # [H, 2S], gate's columns first
    shared_down: Tensor | None = None  # [S, H]

    def inputs(self) -> dict[str, Tensor]:
        """The tensors of `INPUTS` that there are."""
        return {name: tensor for name in INPUTS if (tensor := getattr(self, name)) is not None}

    def require_gradients(self, require: bool) -> None:
        """Whether a forward will remember what a backward needs."""
        for tensor in self.inputs().values():
            tensor.requires_grad_(require)

    def call(self) -> Call:
        """The layer as a call of `mok::moe`."""
        shape = self.shape
        return Call(
            self.x,
            self.ids,
            self.weights,
            [self.gate_up],
            [],
            [self.down],
            b_gate=None if self.gate_up_bias is None else [self.gate_up_bias],
            b_down=None if self.down_bias is None else [self.down_bias],
            shared_w_gate=self.shared_gate_up,
            shared_w_down=self.shared_down,
            num_experts=shape.experts,
            gate_up="interleaved" if shape.interleaved else "gate_up",
            activation="clamped_swiglu" if shape.clamp else "swiglu",
            activation_args=list(shape.clamp or ()),
            group_name=self.ranks.group_name,
        )


def make(shape: Shape, ranks: Ranks, seed: int = 0) -> Layer:
    """Random inputs, of which each rank draws its own; every token chooses k different experts, all alike."""
    random = torch.Generator(ranks.device).manual_seed(seed * 1024 + ranks.rank)
    local, width, inner = shape.experts // ranks.size, shape.width, shape.inner

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, generator=random, device=ranks.device, dtype=torch.bfloat16).mul_(scale)

    def linear(ins: int, outs: int, *stack: int) -> Tensor:
        if shape.in_out:
            return normal(*stack, ins, outs, scale=ins**-0.5)
        return normal(*stack, outs, ins, scale=ins**-0.5).transpose(-1, -2)

    scores = torch.rand(shape.tokens, shape.experts, generator=random, device=ranks.device)
    logits = torch.randn(shape.tokens, shape.choices, generator=random, device=ranks.device)
    return Layer(
        shape,
        ranks,
        x=normal(shape.tokens, width),
        ids=scores.topk(shape.choices).indices,
        weights=torch.softmax(logits, 1),
        gate_up=linear(width, 2 * inner, local),
        down=linear(inner, width, local),
        grad_y=normal(shape.tokens, width),
        # Small, so that hardly a value is near a clamp's limit, where bf16 decides on which side the gradient is.
        gate_up_bias=normal(local, 2 * inner, scale=0.1) if shape.biased else None,
        down_bias=normal(local, width, scale=0.1) if shape.biased else None,
        shared_gate_up=linear(width, 2 * shape.shared) if shape.shared else None,
        shared_down=linear(shape.shared, width) if shape.shared else None,
    )
