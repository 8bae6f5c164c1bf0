"""The MoE layers of Hugging Face transformers: each block that the installed package has, and whole models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from .row import Row
from .transformers_blocks import blocks, build_block, dispatches, distributed_block
from .transformers_models import CONFIGS, language_model

FLOAT32_INSIDE = {
    *("BeamMoE", "HYV3MoE", "OpenAIPrivacyFilterMLP", "Inkling2SparseMoeBlock", "Inkling2LoopSparseMoeBlock"),
    *("HYV4MoE", "HYV4VLMoE", "NemotronHMoE"),
}
"""Blocks that compute a part in float32 whatever their weights are, so that float64 is not theirs."""

DISTRIBUTED = (
    *("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "DeepseekV3MoE", "Glm4MoeMoE"),
    *("OlmoeSparseMoeBlock", "GptOssMLP"),
)
"""Blocks that are also run with their experts on two ranks."""


def _rows() -> Iterator[Row]:
    families = list(blocks().values())
    for name, family in blocks().items():
        layer = family if families.count(family) == 1 else name
        if not dispatches(name):
            yield Row("transformers", "transformers", layer, partial(build_block, name, "eager"), exact(name))
            continue
        for experts, dtypes in (
            ("grouped_mm", (torch.float32, torch.bfloat16)),  # what the product has in eager code
            ("batched_mm", exact(name)),
            ("eager", exact(name)),
        ):
            yield Row(f"transformers, {experts}", "transformers", layer, partial(build_block, name, experts), dtypes)
    if not families:
        return
    for name in CONFIGS:
        yield Row("transformers", "transformers", name, partial(language_model, name), (torch.float32,))
    for name in DISTRIBUTED:
        for exchange in ("auto", "mok"):
            build = partial(distributed_block, name, "grouped_mm", exchange)
            dtypes = (torch.float32, torch.bfloat16)
            yield Row("transformers", "transformers", name, build, dtypes, ranks=2, parallel=f"`{exchange}`")


def exact(name: str) -> tuple[torch.dtype, ...]:
    return (torch.float32 if name in FLOAT32_INSIDE else torch.float64,)


ROWS = tuple(_rows())
