"""DeepSpeed's MoE layer: its three gates, with and without dropping tokens, alone and expert-parallel."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .row import Case, Row

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS = 16, 24, 4, 24


class FeedForward(nn.Module):
    """What DeepSpeed's users bring as an expert."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, dtype=dtype)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Gated(nn.Module):
    """The same with a gate and without biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def layer(k: int, settings: dict[str, Any], expert: type[nn.Module], dtype: torch.dtype) -> Case:
    """`deepspeed.moe.layer.MoE`; on several ranks its experts are spread over all of them.

    The gates' randomness is off (`use_rts`, `top2_2nd_expert_sampling`): eager and compiled code draw other numbers.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    moe = MoE(
        HIDDEN, expert(dtype), EXPERTS, ep_size=ranks, k=k, use_rts=False, top2_2nd_expert_sampling=False, **settings
    ).to(dtype)
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(1 + rank)
    for parameter in moe.deepspeed_moe.experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    if ranks > 1:
        if not deepspeed.comm.is_initialized():
            # Without its own reduction through shared memory, which it would compile now.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed.comm.init_distributed("gloo")
        moe.set_deepspeed_parallelism()
        assert groups._get_expert_parallel_world_size(moe.expert_group_name) == ranks
    return Case(moe, (torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype, requires_grad=True),))


DROPPING: dict[str, Any] = {"capacity_factor": 0.75}
"""Less than one, so that tokens are dropped."""
KEEPING: dict[str, Any] = {"drop_tokens": False}


def name(k: int, settings: dict[str, Any], expert: type[nn.Module]) -> str:
    drops = "without dropping" if settings.get("drop_tokens") is False else "with dropping"
    kind = "Residual MoE" if settings.get("use_residual") else "MoE"
    return f"{kind} k={k} {drops}{' and swiglu experts' if expert is Gated else ''}"


def row(k: int, settings: dict[str, Any], expert: type[nn.Module] = FeedForward, ranks: int = 1) -> Row:
    build = partial(layer, k, settings, expert)
    parallel = "_AllToAll" if ranks > 1 else ""
    return Row("DeepSpeed", "deepspeed", name(k, settings, expert), build, ranks=ranks, parallel=parallel)


ROWS = (
    *(row(k, settings) for settings in (DROPPING, KEEPING) for k in (1, 2, 4)),
    row(4, DROPPING, Gated),
    *(row(k, {**DROPPING, "use_residual": True}) for k in (1, 4)),
    *(row(k, settings, ranks=2) for settings in (DROPPING, KEEPING) for k in (1, 2, 4)),
)
