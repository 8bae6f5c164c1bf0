"""The `reference` provider: the plain statement, in ATen ops, of the numbers that every provider must give.

It runs on any device, for every call that the schema allows. It keeps nothing from forward to backward: the
backward dispatches again and recomputes. It reads counts on the host, so it waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mokfx.ops import feed_forward, shared_expert
from mokfx.ops.arguments import Call
from mokfx.ops.capacity import kept_ids
from mokfx.ops.checks import check_ids
from mokfx.ops.exchange import Exchange
from mokfx.ops.feed_forward import rounded


@dataclass(frozen=True)
class _Dispatched:
    """The slots of a call, and their rows at their experts."""

    exchange: Exchange
    token: Tensor
    """`[n]`: the token of each slot."""
    weight: Tensor
    """`[n]`, wide: the weight of each slot, 0 for a dropped one."""
    rows: list[Tensor]
    """For each local expert its rows of x."""


def forward(call: Call) -> Tensor:
    """`mok::moe`."""
    check_ids(call)
    sent = _dispatch(call)
    at_expert = None if call.weight_on == "output" else sent.exchange.dispatch(sent.weight)
    outputs = []
    for index, rows in enumerate(sent.rows):
        weight = None if at_expert is None else at_expert[index]
        output, _ = _expert_forward(call, index, rows, weight)
        outputs.append(output.to(call.x.dtype))
    slots = sent.exchange.combine(outputs).to(call.wide)
    if call.weight_on == "output":
        slots = slots * sent.weight[:, None]
    y = _sum_choices(slots, call)
    if (shared := shared_expert.forward(call)) is not None:
        y = y + shared
    return y.to(call.y_dtype)


def backward(grad_y: Tensor, call: Call) -> list[Tensor]:
    """`mok::moe_backward`."""
    check_ids(call)
    gradients = call.empty_gradients()
    sent = _dispatch(call)
    at_expert = sent.exchange.dispatch(sent.weight)
    d_y = sent.exchange.dispatch(grad_y, sent.token)
    d_rows, d_weights = [], []
    for index, rows in enumerate(sent.rows):
        d_x, d_weight = _expert_backward(
            call, gradients, index, rows, at_expert[index], d_y[index].to(call.wide)
        )
        d_rows.append(d_x.to(call.x.dtype))
        d_weights.append(d_weight)
    d_x = _sum_choices(sent.exchange.combine(d_rows).to(call.wide), call)
    if (d_shared := shared_expert.backward(call, grad_y.to(call.wide), gradients)) is not None:
        d_x = d_x + d_shared
    gradients.x.copy_(d_x)
    gradients.topk_weights.copy_(sent.exchange.combine(d_weights).view(call.topk_ids.shape))
    return gradients.gradients()


def _dispatch(call: Call) -> _Dispatched:
    ids = kept_ids(call)
    exchange = Exchange(ids.flatten(), call.num_experts, call.group_name)
    tokens, choices = ids.shape
    token = torch.arange(tokens, device=ids.device).repeat_interleave(choices)
    # where(), not a product: a dropped slot contributes nothing even if its weight is not finite
    weight = torch.where(ids >= 0, call.topk_weights.to(call.wide), 0.0).flatten()
    return _Dispatched(exchange, token, weight, exchange.dispatch(call.x, token))


def _expert_forward(
    call: Call, index: int, rows: Tensor, weight: Tensor | None
) -> tuple[Tensor, feed_forward.Trace]:
    """The expert's output, wide and not rounded; `weight` `[n]` is needed unless it applies to the output."""
    if call.weight_on == "input" and weight is not None:
        rows = (rows.to(call.wide) * weight[:, None]).to(call.x.dtype)
    return feed_forward.forward(call.expert(index), rows, weight if call.weight_on == "hidden" else None)


def _expert_backward(
    call: Call, gradients: Call, index: int, rows: Tensor, weight: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Fills the expert's weight gradients; returns those of its rows of x and of their weights, both wide."""
    dtype, expert = call.x.dtype, call.expert(index)
    output, trace = _expert_forward(call, index, rows, weight)
    hidden_weight = weight if call.weight_on == "hidden" else None
    d_output = rounded(d_y * weight[:, None] if call.weight_on == "output" else d_y, dtype)
    at = feed_forward.backward(expert, trace, d_output, hidden_weight)
    feed_forward.write_weight_gradients(gradients.expert(index), trace, d_output, at)
    if call.weight_on == "output":
        return at.rows, (d_y * rounded(output, dtype)).sum(1)
    if call.weight_on == "input":
        return at.rows * weight[:, None], (at.rows * rows.to(call.wide)).sum(1)
    assert at.hidden_weight is not None
    return at.rows, at.hidden_weight


def _sum_choices(slots: Tensor, call: Call) -> Tensor:
    """`[n, H]` by slot to `[T, H]`, added in choice order."""
    tokens, choices = call.topk_ids.shape
    by_choice = slots.view(tokens, choices, slots.shape[1])
    total = by_choice[:, 0]
    for choice in range(1, choices):
        total = total + by_choice[:, choice]
    return total
