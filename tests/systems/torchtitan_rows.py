"""The MoE layers of torchtitan, and the models that use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .row import Case, Row
from .torchtitan_layers import (
    HIDDEN,
    TOKENS,
    Config,
    ExpertParallel,
    built,
    deepseek_v3_model,
    deepseek_v3_moe,
    gpt_oss_moe,
    moe,
    qwen3_model,
    qwen3_moe,
    tokens,
)

LAYERS: dict[str, Callable[[], Config]] = {
    "DeepSeek-V3 MoE": deepseek_v3_moe,
    "Qwen3 MoE": qwen3_moe,
    "gpt-oss MoE": gpt_oss_moe,
    "MoE with top-1": partial(moe, top_k=1, normalise=False),
    "MoE without load balancing": partial(moe, balanced=False),
}
MODELS: dict[str, Callable[[], Config]] = {
    "DeepSeek-V3 model of 1 dense and 2 MoE blocks": deepseek_v3_model,
    "Qwen3 model of 1 dense and 2 MoE blocks": qwen3_model,
}


def example(dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
    torch.manual_seed(1 + rank)
    return torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype, requires_grad=True)


def layer(config: Callable[[], Config], dtype: torch.dtype) -> Case:
    return Case(built(config(), dtype), (example(dtype),))


def model(config: Callable[[], Config], dtype: torch.dtype) -> Case:
    # Weights for which no token's choice in the second layer is so close that rounding in the first one decides it.
    return Case(built(config(), dtype, seed=1), tokens(), moe_layers=2)


def expert_parallel(config: Callable[[], Config], dtype: torch.dtype) -> Case:
    return Case(ExpertParallel(config, dtype), (example(dtype, dist.get_rank()),))


BF16 = (torch.bfloat16,)
"""torchtitan's experts compute in bf16, whatever the model does."""

ROWS = (
    *(Row("torchtitan", "torchtitan", name, partial(layer, config), BF16) for name, config in LAYERS.items()),
    *(Row("torchtitan", "torchtitan", name, partial(model, config), BF16) for name, config in MODELS.items()),
    *(
        Row("torchtitan", "torchtitan", name, partial(expert_parallel, LAYERS[name]), BF16, ranks, "ExpertParallel")
        for ranks in (2, 4)
        for name in ("DeepSeek-V3 MoE", "Qwen3 MoE", "gpt-oss MoE")
    ),
)
