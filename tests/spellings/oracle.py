"""What a layer means, stated without dispatch: every token through every expert, masked, in float64.

It shares the router and the parameters with the layer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .capacity import CAPACITY, ORDER, capacity_of
from .experts import Experts
from .layer import MoE
from .networks import EXACT, GATED, INTERLEAVED, UNGATED
from .router import Routed
from .shared import Shared


def exact(layers: Sequence[MoE], rank: int, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Routed]:
    """The output of `layers[rank]` for its tokens, when `layers` hold the experts of all ranks: y as float64.

    Gradients flow to x, to this rank's router and shared expert, and to every rank's experts.
    """
    layer, shape = layers[rank], x.shape
    x = x.reshape(-1, shape[-1])
    routed = layer.router(x, token_ids)
    ids = routed.ids
    if layer.spelling.whole in CAPACITY:
        ids = kept(ids, capacity_of(layer, x.shape[0]), ORDER[layer.spelling.whole])
    y = routed_sum(
        [m.ffn for m in layers], x.double(), ids, routed.weights.double(), layer.spelling.weight_on
    )
    if layer.shared is not None:
        y = y + shared_expert(layer.shared, x.double())
    return y.view(shape), routed


def kept(ids: Tensor, capacity: int, order: str) -> Tensor:
    """The ids [T, k] with -1 where `capacity` earlier slots chose the same expert."""
    tokens, k = ids.shape
    slots = [(t, c) for t in range(tokens) for c in range(k)]
    if order == "choice":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    taken: dict[int, int] = {}
    result = ids.clone()
    for t, c in slots:
        expert = int(ids[t, c])
        taken[expert] = taken.get(expert, 0) + 1
        if taken[expert] > capacity:
            result[t, c] = -1
    return result


def routed_sum(ranks: list[Experts], x: Tensor, ids: Tensor, weights: Tensor, weight_on: str) -> Tensor:
    """Choice by choice and expert by expert, over all tokens."""
    y = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        weight = weights[:, choice, None]
        for e in range(sum(m.count for m in ranks)):
            owner = ranks[e // ranks[0].count]
            out = one_expert(owner, e % owner.count, x, weight, weight_on)
            y = y + torch.where(ids[:, choice, None] == e, out, 0.0)
    return y


def one_expert(m: Experts, e: int, x: Tensor, weight: Tensor, weight_on: str) -> Tensor:
    rows = x * weight if weight_on == "input" else x
    if not m.gated:
        h = EXACT[UNGATED[m.act][0]](_project(m, "up", e, rows))
    else:
        if m.split == "apart":
            halves = _project(m, "gate", e, rows), _project(m, "up", e, rows)
        else:
            fused = _project(m, "up", e, rows)
            inner = fused.shape[-1] // 2
            columns = (
                (slice(0, None, 2), slice(1, None, 2))
                if m.split in INTERLEAVED
                else (slice(0, inner), slice(inner, None))
            )
            halves = fused[:, columns[int(m.up_first)]], fused[:, columns[1 - int(m.up_first)]]
        h = EXACT[GATED[m.act][0]](*halves)
    y = _project(m, "down", e, h * weight if weight_on == "hidden" else h)
    return y * weight if weight_on == "output" else y


def _project(m: Experts, name: str, e: int, rows: Tensor) -> Tensor:
    if m.listed:
        linear = getattr(m, name)[e]
        weight, bias = linear.weight.t(), linear.bias
    else:
        weight = getattr(m, name)[e]
        weight = weight if m.storage == "in_out" else weight.t()
        bias = getattr(m, name + "_bias")[e] if hasattr(m, name + "_bias") else None
    out = rows @ weight.double()
    return out if bias is None else out + bias.double()


def shared_expert(m: Shared, x: Tensor) -> Tensor:
    gate: Tensor
    up: Tensor
    down: Tensor
    if hasattr(m, "w1"):
        gate, up, down = m.w1, m.w3, m.w2
    elif hasattr(m, "gate_up"):
        gate, up = m.gate_up.weight.t().tensor_split(2, dim=1)
        down = m.down.weight.t()
    else:
        gate, up, down = m.gate.weight.t(), m.up.weight.t(), m.down.weight.t()
    g, u = x @ gate.double(), x @ up.double()
    y = (EXACT["swiglu"](g, u)) @ down.double()
    if hasattr(m, "sigmoid_gate"):
        y = y * torch.sigmoid(x @ m.sigmoid_gate.weight.t().double())
    return y
