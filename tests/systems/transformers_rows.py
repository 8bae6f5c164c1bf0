"""The MoE layers of Hugging Face transformers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from .row import Case, Row

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 32, 16, 4, 2, 24


def block(family: str, module: str, config: dict[str, Any], experts_implementation: str, dtype: torch.dtype) -> Case:
    """The MoE block of a model, with random weights."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = import_module(f"transformers.models.{family}")
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_experts_per_tok": TOP_K,
        "num_local_experts": EXPERTS, "num_hidden_layers": 2,
    }
    cfg = getattr(configuration, config.pop("class", "MixtralConfig"))(**sizes)
    cfg._experts_implementation = experts_implementation
    torch.manual_seed(0)
    layer = getattr(modeling, module)(cfg).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Case(layer, (torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype, requires_grad=True),))


ROWS = (
    Row(
        "transformers",
        "transformers",
        "Mixtral",
        partial(block, "mixtral", "MixtralSparseMoeBlock", {}, "batched_mm"),
    ),
)
