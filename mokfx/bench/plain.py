"""The layer as a model would write it in plain torch: what `eager` and `inductor` run."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from .layer import Layer
from .shapes import Shape


def moe(
    shape: Shape,
    group: dist.ProcessGroup | None,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
) -> Tensor:
    """y of a layer: sort slots by expert, exchange, grouped products, exchange back, unsort, weighted sum."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = x[order // shape.choices]
    counts = torch.bincount(flat, minlength=shape.experts)
    if group is None:
        out = _experts(shape, rows, counts, gate_up, down, gate_up_bias, down_bias)
    else:
        counts = counts.view(group.size(), -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = collectives.all_to_all_single_autograd(rows, received, sent, group)
        local = torch.arange(arriving.shape[1], device=x.device).repeat(group.size())
        by_expert = local.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        out = _experts(shape, rows[by_expert], arriving.sum(0), gate_up, down, gate_up_bias, down_bias)
        out = torch.empty_like(out).index_copy(0, by_expert, out)
        out = collectives.all_to_all_single_autograd(out, sent, received, group)
    slots = torch.empty_like(out).index_copy(0, order, out).view(*ids.shape, -1)
    y = (slots.float() * weights[..., None]).sum(1)
    if shared_gate_up is not None and shared_down is not None:
        gate, up = (x @ shared_gate_up).chunk(2, -1)
        y = y + (F.silu(gate) * up) @ shared_down
    return y.to(x.dtype)


def _experts(
    shape: Shape,
    rows: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The networks of this rank's experts on rows sorted by expert."""
    ends = counts.cumsum(0, dtype=torch.int32)
    first = torch._grouped_mm(rows, gate_up, offs=ends)
    if gate_up_bias is not None:
        first = first + gate_up_bias.repeat_interleave(counts, 0, output_size=rows.shape[0])
    gate, up = (first[:, 0::2], first[:, 1::2]) if shape.interleaved else first.chunk(2, -1)
    if shape.clamp is None:
        hidden = F.silu(gate) * up
    else:
        alpha, limit = shape.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(gate * alpha) * (up + 1)
    out = torch._grouped_mm(hidden, down, offs=ends)
    if down_bias is not None:
        out = out + down_bias.repeat_interleave(counts, 0, output_size=rows.shape[0])
    return out


def arguments(layer: Layer) -> dict[str, Any]:
    """What `moe` takes after the shape and the group."""
    names = list(inspect.signature(moe).parameters)[2:]
    return {name: getattr(layer, name) for name in names}
