"""Random MoE layers, the routings that tests ask for, and two references of the same products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTINGS = ("balanced", "zipf", "one_expert", "few_experts", "dropped")


@dataclass(frozen=True)
class Case:
    x: Tensor
    ids: Tensor
    weights: Tensor
    gate: Tensor  # [E, H, I]
    up: Tensor
    down: Tensor  # [E, I, H]


def route(tokens: int, experts: int, choices: int, routing: str) -> Tensor:
    """Ids [T, k] int64 on the GPU, drawn as `routing` says."""
    scores = torch.rand(tokens, experts, device="cuda")
    if routing == "zipf":
        scores = scores ** (torch.arange(1, experts + 1, device="cuda") ** 0.7)
    elif routing == "few_experts":
        scores[:, max(choices, experts // 4) :] = -1
    ids = scores.topk(choices).indices
    if routing == "one_expert":
        ids = torch.full_like(ids, experts // 2)
    elif routing == "dropped":
        ids = torch.where(torch.rand(ids.shape, device="cuda") < 0.3, -1, ids)
    return ids


def stored(experts: int, ins: int, outs: int, n_major: bool) -> Tensor:
    """Random bf16 weights [E, in, out], stored that way round or as nn.Linear does."""
    shape = (experts, ins, outs) if n_major else (experts, outs, ins)
    weight = (torch.randn(shape, device="cuda") * ins**-0.5).bfloat16()
    return weight if n_major else weight.transpose(1, 2)


def make(
    tokens: int,
    width: int,
    inner: int,
    experts: int,
    choices: int,
    routing: str = "balanced",
    order: str = "kk",
) -> Case:
    up_n, down_n = order[0] == "n", order[1] == "n"
    return Case(
        torch.randn(tokens, width, device="cuda").bfloat16(),
        route(tokens, experts, choices, routing),
        torch.rand(tokens, choices, device="cuda"),
        stored(experts, width, inner, up_n),
        stored(experts, width, inner, up_n),
        stored(experts, inner, width, down_n),
    )


def reference(case: Case, dtype: torch.dtype) -> Tensor:
    """The layer expert by expert in plain torch, every product in `dtype`, as is the result."""
    x = case.x.to(dtype)
    tokens, choices = case.ids.shape
    flat = case.ids.flatten()
    slots = torch.zeros(tokens * choices, x.shape[1], dtype=dtype, device=x.device)
    for expert in range(case.gate.shape[0]):
        at = (flat == expert).nonzero().squeeze(1)
        if at.numel():
            rows = x[at // choices]
            gate, up = rows @ case.gate[expert].to(dtype), rows @ case.up[expert].to(dtype)
            slots[at] = torch.nn.functional.silu(gate) * up @ case.down[expert].to(dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    y = (slots.view(tokens, choices, -1).to(wide) * case.weights.to(wide)[..., None]).sum(1)
    return y.to(dtype)


def error(y: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN stays NaN."""
    return float((y.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


def poison(gigabytes: float = 2.0) -> None:
    """Fills memory that torch's allocator will hand out next with NaN, in large and in small blocks."""
    torch.cuda.synchronize()
    large = torch.full((int(gigabytes * 2**30),), 0xFF, dtype=torch.uint8, device="cuda")
    small = [torch.full((2**18,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del large, small
