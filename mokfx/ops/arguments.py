"""One call's tensors and settings as a value, and the view of each local expert in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

TENSORS = (
    "x",
    "topk_ids",
    "topk_weights",
    "w_gate",
    "w_up",
    "w_down",
    "b_gate",
    "b_up",
    "b_down",
    "shared_w_gate",
    "shared_w_up",
    "shared_w_down",
    "shared_sigmoid",
)
"""The arguments that hold tensors, in the order of the schema, which is also that of the gradients."""

POSITIONAL = TENSORS[:6]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The weights of one two-layer network, apart however they are stored: all of them are views.

    `gate` (None if the activation has none) and `up` are `[H, I]`, `down` is `[I, H]`, biases are vectors.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "swiglu"
    activation_args: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `mok::moe` under their names in schema.py, with the same defaults."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate: Sequence[Tensor]
    w_up: Sequence[Tensor]
    w_down: Sequence[Tensor]
    b_gate: Sequence[Tensor] | None = None
    b_up: Sequence[Tensor] | None = None
    b_down: Sequence[Tensor] | None = None
    shared_w_gate: Tensor | None = None
    shared_w_up: Tensor | None = None
    shared_w_down: Tensor | None = None
    shared_sigmoid: Tensor | None = None
    num_experts: int = 0
    gate_up: str = "apart"
    activation: str = "swiglu"
    activation_args: Sequence[float] = ()
    weight_on: str = "output"
    capacity: int | torch.SymInt | None = None
    capacity_order: str = "choice"
    out_dtype: torch.dtype | None = None
    group_name: str | None = None

    @property
    def y_dtype(self) -> torch.dtype:
        """The output's dtype."""
        return self.x.dtype if self.out_dtype is None else self.out_dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype that products accumulate in."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    @property
    def local_experts(self) -> int:
        """How many experts this rank's weights hold."""
        return _count(self.w_down, matrix_dim=2)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is present, in the order of `TENSORS`: x, topk_ids, topk_weights, ..."""
        flat: list[Tensor] = []
        for name in TENSORS:
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                flat.extend(value)
            elif value is not None:
                flat.append(value)
        return flat

    def with_tensors(self, flat: Iterable[Any]) -> Call:
        """This call with `flat`, tensors or stand-ins for them, in the places of `tensors()`."""
        values = iter(flat)
        changed: dict[str, Any] = {}
        for name in TENSORS:
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                changed[name] = [next(values) for _ in value]
            elif value is not None:
                changed[name] = next(values)
        return replace(self, **changed)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments that make this call of `mok::moe`."""
        keywords = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in POSITIONAL
        }
        return tuple(getattr(self, name) for name in POSITIONAL), keywords

    def empty_gradients(self) -> Call:
        """The same call with an uninitialised gradient buffer for each tensor; `topk_ids` stays."""
        x, ids, weights, *others = self.tensors()
        dense = torch.contiguous_format
        return self.with_tensors(
            [
                torch.empty_like(x, memory_format=dense),
                ids,
                torch.empty_like(weights, memory_format=dense),
                *(torch.empty_like(tensor) for tensor in others),
            ]
        )

    def gradients(self) -> list[Tensor]:
        """Of a call made by `empty_gradients`: the buffers in the order that `mok::moe_backward` returns."""
        x, _, *others = self.tensors()
        return [x, *others]

    def expert(self, index: int) -> FeedForward:
        """Views of local expert `index`."""
        gate, up = _pick(self.w_gate, index, matrix_dim=2), _pick(self.w_up, index, matrix_dim=2)
        gate_bias, up_bias = _pick(self.b_gate, index, matrix_dim=1), _pick(self.b_up, index, matrix_dim=1)
        down = _pick(self.w_down, index, matrix_dim=2)
        if self.gate_up != "apart" and gate is not None:
            gate, up = _halves(gate, self.gate_up)
            gate_bias, up_bias = (None, None) if gate_bias is None else _halves(gate_bias, self.gate_up)
        assert up is not None and down is not None
        down_bias = _pick(self.b_down, index, matrix_dim=1)
        return FeedForward(
            gate, up, down, gate_bias, up_bias, down_bias, self.activation, self.activation_args
        )

    def shared(self) -> FeedForward | None:
        """The shared expert, None if there is none."""
        if self.shared_w_gate is None or self.shared_w_down is None:
            return None
        if self.shared_w_up is None:
            return FeedForward(*_halves(self.shared_w_gate, "gate_up"), self.shared_w_down)
        return FeedForward(self.shared_w_gate, self.shared_w_up, self.shared_w_down)


def is_stacked(layer: Sequence[Tensor], matrix_dim: int) -> bool:
    """Whether `layer` is one tensor of all the local experts (`matrix_dim`: 2 for weights, 1 for biases)."""
    return len(layer) == 1 and layer[0].dim() == matrix_dim + 1


def _count(layer: Sequence[Tensor], matrix_dim: int) -> int:
    return layer[0].shape[0] if is_stacked(layer, matrix_dim) else len(layer)


def _pick(layer: Sequence[Tensor] | None, index: int, matrix_dim: int) -> Tensor | None:
    if not layer:
        return None
    return layer[0][index] if is_stacked(layer, matrix_dim) else layer[index]


def _halves(fused: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up): views of a fused weight's columns or of a fused bias."""
    if layout == "interleaved":
        return fused[..., 0::2], fused[..., 1::2]
    first, second = fused.chunk(2, dim=-1)
    return (first, second) if layout == "gate_up" else (second, first)
