"""The right answer in float32, and how far a variant is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mokfx.ops.activations import ACTIVATIONS

from .layer import Layer

WITHIN = 1e-2
"""The relative error (Euclidean norm) of a right bf16 result is 3e-3 to 5e-3, and of one wrong row in 8192 1.6e-2."""
WITHIN_ROW = 3e-2
"""The same of a single row of y and dx, so that one wrong row shows among any number."""


@dataclass(frozen=True)
class Truth:
    """y and, with a backward, the gradients of a layer's inputs; of experts' weights and biases only of a few."""

    y: Tensor
    gradients: Mapping[str, Tensor]
    experts: Sequence[int]
    """The local experts whose gradients are there: the busiest, the first and the last."""


PER_EXPERT = ("gate_up", "down", "gate_up_bias", "down_bias")


def truth(layer: Layer, backward: bool) -> Truth:
    """Every expert by itself, in float32 on the layer's device. A collective."""
    shape, ranks = layer.shape, layer.ranks
    x, ids, weights = ranks.gather(layer.x.detach()), ranks.gather(layer.ids), ranks.gather(layer.weights.detach())
    grad_y = ranks.gather(layer.grad_y) if backward else None
    local, flat = layer.down.shape[0], ids.flatten()
    y, dx = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    d_weights = torch.zeros(flat.shape, device=x.device)
    first = ranks.rank * local
    counts = torch.bincount(flat, minlength=shape.experts)[first : first + local]
    experts = sorted({0, int(counts.argmax()), local - 1})
    found: dict[str, list[Tensor]] = {name: [] for name in PER_EXPERT}
    for expert in range(local):
        at = (flat == first + expert).nonzero().squeeze(1)
        tokens = at // shape.choices
        wide = {
            name: tensor.detach()[expert].float()
            for name in PER_EXPERT
            if (tensor := getattr(layer, name)) is not None
        }
        leaves = [x[tokens].float(), weights.flatten()[at], *wide.values()]
        with torch.set_grad_enabled(backward):
            for leaf in leaves:
                leaf.requires_grad_(backward)
            out = _expert(layer, leaves[0], leaves[1], wide)
        y.index_add_(0, tokens, out.detach())
        if grad_y is None:
            continue
        d_rows, d_at, *rest = torch.autograd.grad(out, leaves, grad_y[tokens].float())
        dx.index_add_(0, tokens, d_rows)
        d_weights[at] = d_at
        if expert in experts:
            for name, gradient in zip(wide, rest, strict=True):
                found[name].append(gradient)
    mine = slice(ranks.rank * shape.tokens, (ranks.rank + 1) * shape.tokens)
    y = ranks.sum(y)[mine]
    gradients: dict[str, Tensor] = {}
    if backward:
        gradients = {"x": ranks.sum(dx)[mine], "weights": ranks.sum(d_weights).view_as(ids)[mine]}
        gradients |= {name: torch.stack(some) for name, some in found.items() if some}
    _add_shared(layer, y, gradients, backward)
    return Truth(y, gradients, experts)


def _expert(layer: Layer, rows: Tensor, weights: Tensor, wide: Mapping[str, Tensor]) -> Tensor:
    shape = layer.shape
    first = rows @ wide["gate_up"]
    if "gate_up_bias" in wide:
        first = first + wide["gate_up_bias"]
    gate, up = (first[:, 0::2], first[:, 1::2]) if shape.interleaved else first.chunk(2, -1)
    call = layer.call()
    out = ACTIVATIONS[call.activation].value(gate, up, call.activation_args) @ wide["down"]
    if "down_bias" in wide:
        out = out + wide["down_bias"]
    return out * weights[:, None]


def _add_shared(layer: Layer, y: Tensor, gradients: dict[str, Tensor], backward: bool) -> None:
    if layer.shared_gate_up is None or layer.shared_down is None:
        return
    leaves = [tensor.detach().float() for tensor in (layer.x, layer.shared_gate_up, layer.shared_down)]
    with torch.set_grad_enabled(backward):
        for leaf in leaves:
            leaf.requires_grad_(backward)
        gate, up = (leaves[0] @ leaves[1]).chunk(2, -1)
        out = (F.silu(gate) * up) @ leaves[2]
    y += out.detach()
    if backward:
        dx, d_gate_up, d_down = torch.autograd.grad(out, leaves, layer.grad_y.float())
        gradients["x"] += dx
        gradients |= {"shared_gate_up": d_gate_up, "shared_down": d_down}


def distances(right: Truth, y: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of y and of each gradient, and of the worst row of y and dx; NaN stays NaN.

    Raises KeyError if a gradient is missing.
    """
    pairs = {"y": (y, right.y)}
    for name, wanted in right.gradients.items():
        got = gradients[name]
        pairs["d_" + name] = (got[list(right.experts)] if name in PER_EXPERT else got, wanted)
    found = {name: _distance(*pair) for name, pair in pairs.items()}
    for name in ("y", "d_x"):
        if name in pairs:
            found[f"a row of {name}"] = _worst_row(*pairs[name])
    return found


def wrong(found: Mapping[str, float]) -> str | None:
    """What is too far from the truth, in words, or None."""
    for name, error in found.items():
        within = WITHIN_ROW if name.startswith("a row") else WITHIN
        if not error <= within:  # NaN is wrong too
            return f"{name} is off by {error:.2g} of its norm, and at most {within:g} is right"
    return None


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _worst_row(got: Tensor, wanted: Tensor) -> float:
    if wanted.shape[0] == 0:
        return 0.0
    rows = (got.float() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    return float("nan") if rows.isnan().any() else float(rows.max())
