"""What the backward kernel needs of a case, and the gradients that it must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mokfx.kernels import provider
from mokfx.kernels.gradients import gradients
from mokfx.kernels.workspace import rows_of
from mokfx.ops import reference
from mokfx.ops.activations import ACTIVATIONS
from mokfx.ops.arguments import TENSORS, Call
from tests.gpu.moe_case import Case, error


@dataclass(frozen=True)
class Problem:
    """A call whose backward is wanted: its output's gradient, and the op's arguments."""

    grad_y: Tensor
    call: Call


def problem(case: Case, **changes: object) -> Problem:
    """The call of a case, with the op's arguments in `changes`; a random gradient of its output."""
    arguments: dict[str, object] = {"w_gate": [case.gate], "w_up": [case.up], "w_down": [case.down]}
    arguments |= {"num_experts": case.gate.shape[0]} | changes
    return Problem(torch.randn_like(case.x), Call(case.x, case.ids, case.weights, **arguments))  # type: ignore[arg-type]


def saved(call: Call) -> Tensor:
    """[parts, rows, I]: what the forward keeps. Rows of no expert are NaN here; padding holds the biases."""
    flat, choices = call.topk_ids.flatten(), call.topk_ids.shape[1]
    networks = [call.expert(expert) for expert in range(call.num_experts)]
    parts = 1 if networks[0].gate is None else 2
    shape = parts, rows_of(flat.numel(), call.num_experts), networks[0].up.shape[1]
    kept = torch.full(shape, torch.nan, dtype=call.x.dtype, device=call.x.device)
    begin = 0
    for expert, network in enumerate(networks):
        at = (flat == expert).nonzero().squeeze(1)
        end = begin + -(-at.numel() // 64) * 64
        inputs = torch.zeros(end - begin, call.x.shape[1], device=call.x.device)
        inputs[: at.numel()] = call.x[at // choices].float()
        layers = [(network.gate, network.gate_bias), (network.up, network.up_bias)][2 - parts :]
        for part, (weight, bias) in enumerate(layers):
            assert weight is not None
            product = inputs @ weight.float()
            kept[part, begin:end] = (product if bias is None else product + bias.float()).to(kept.dtype)
        begin = end
    return kept


def run(given: Problem, kept: Tensor | None = None, **options: Any) -> list[Tensor]:
    """The kernel's gradients in the op's order."""
    call = given.call
    assert provider.call_reason(call) is None
    x, weights, layer = provider.arguments(call)
    kept = saved(call) if kept is None else kept
    return gradients(given.grad_y, call, x, weights, layer, kept, timeout=5.0, **options)


def expected(given: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The op's own statement of the gradients, all in `dtype`."""
    wide = [t.to(dtype) if t.is_floating_point() else t for t in given.call.tensors()]
    return reference.backward(given.grad_y.to(dtype), given.call.with_tensors(wide))


def unfused(given: Problem) -> list[Tensor]:
    """The gradients of the same layer by autograd, op by op in the call's dtype; sums over choices in float32."""
    call, (tokens, choices) = given.call, given.call.topk_ids.shape
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in call.tensors()]
    call = call.with_tensors(leaves)
    rows = call.x.detach().repeat_interleave(choices, 0).requires_grad_()  # of each slot, for a sum of our own
    flat, outputs = call.topk_ids.flatten(), torch.zeros_like(rows)
    scale = call.topk_weights.float().flatten()[:, None]
    for expert in range(call.num_experts):
        network, at = call.expert(expert), (flat == expert).nonzero().squeeze(1)
        up = rows[at] @ network.up
        up = up if network.up_bias is None else up + network.up_bias
        gate = None if network.gate is None else rows[at] @ network.gate
        gate = gate if gate is None or network.gate_bias is None else gate + network.gate_bias
        hidden = ACTIVATIONS[call.activation].value(gate, up, call.activation_args)
        if call.weight_on == "hidden":
            hidden = (hidden * scale[at]).to(up.dtype)
        output = hidden @ network.down
        outputs = outputs.index_put((at,), output if network.down_bias is None else output + network.down_bias)
    slots = outputs.float() * (scale if call.weight_on == "output" else 1)
    y = slots.view(tokens, choices, -1).sum(1).to(call.y_dtype)
    floating = [leaf for leaf in leaves[1:] if leaf.is_floating_point()]
    d_rows, *others = torch.autograd.grad(y, [rows, *floating], given.grad_y)
    return [d_rows.float().view(tokens, choices, -1).sum(1).to(call.x.dtype), *others]


def names(call: Call) -> list[str]:
    """What each gradient belongs to."""
    present = [name for name in TENSORS if name != "topk_ids" and getattr(call, name) is not None]
    lists = [(name, getattr(call, name)) for name in present]
    return [name for name, value in lists for _ in range(len(value) if isinstance(value, list) else 1)]


def errors(given: Problem, got: list[Tensor], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """By gradient, all matrices of a list together: our relative error, and that of the same layer unfused in bf16."""
    truth, theirs = expected(given, dtype), unfused(given)
    by_name: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for name, a, b, c in zip(names(given.call), got, theirs, truth, strict=True):
        assert a.shape == c.shape, name
        by_name.setdefault(name, []).append((a, b, c))
    found = {}
    for name, triples in by_name.items():
        ours, plain, true = (torch.stack(one) for one in zip(*triples, strict=True))
        found[name] = error(ours, true), error(plain, true)
    return found


def check(given: Problem, slack: float = 1.5, **options: Any) -> None:
    """Each gradient apart is no farther from the truth than 1.5 times what unfused bf16 is."""
    call = given.call
    got = run(given, **options)
    for name, tensor in zip(names(call), got, strict=True):
        assert tensor.dtype == getattr(call, name)[0].dtype if isinstance(getattr(call, name), list) else True
    large = call.x.numel() * call.num_experts * call.w_down[0].shape[-2] >= 2**33
    for name, (ours, theirs) in errors(given, got, torch.float32 if large else torch.float64).items():
        assert ours <= slack * theirs, f"gradient of {name}: error {ours:.2e}, of an unfused computation {theirs:.2e}"
