"""Whole language models of transformers, tiny, as `from_config` makes them."""

from __future__ import annotations

from typing import Any

import torch

from .row import Case

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "num_hidden_layers": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2, "output_router_logits": True,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 6},
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "Qwen2MoeForCausalLM": {"num_experts": 6, "shared_expert_intermediate_size": 24},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4, "head_dim": 8,
    },
    "OlmoeForCausalLM": {"num_experts": 6},
    "GptOssForCausalLM": {"num_local_experts": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "Glm4MoeForCausalLM": {"n_routed_experts": 6, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "Llama4ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24},
    "Gemma4ForCausalLM": {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 64,
    },
    "JetMoeForCausalLM": {"num_local_experts": 4, "kv_channels": 8},
}  # fmt: skip
"""What each model's configuration adds to the sizes: two MoE layers, and a dense one where the family has them."""


def build_model(name: str, dtype: torch.dtype, **settings: Any) -> Any:
    """A model with random weights, the package's default implementation of experts, and two MoE layers."""
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = model_class.config_class(**{**SIZES, **CONFIGS[name], **settings})
    return model_class._from_config(config, dtype=dtype)


def language_model(name: str, dtype: torch.dtype, **settings: Any) -> Case:
    """A model called for its loss, with its auxiliary loss and router logits where it has them."""
    model = build_model(name, dtype, **settings)
    ids = torch.randint(3, 64, (2, 12))
    return Case(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, moe_layers=2)
