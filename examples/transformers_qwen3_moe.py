"""A Qwen3-MoE language model of Hugging Face transformers, compiled whole and trained beside eager: tiny, on the CPU.

    python examples/transformers_qwen3_moe.py

The model is not changed. With a checkpoint, `AutoModelForCausalLM.from_pretrained(...)` takes the place of
`tiny_model`; with experts on several ranks, give it `distributed_config=DistributedConfig(ep_size=...)`.
"""

from __future__ import annotations

import copy

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import mokfx


def tiny_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        mlp_only_layers=[0],  # the first layer is dense
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,  # for the auxiliary loss that balances the experts
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    model = tiny_model()
    twin = copy.deepcopy(model)
    compiled = mokfx.compile(twin, options={"mok.compiler": "aot_eager"})  # left out: Inductor, which writes C++ here
    ids = torch.randint(64, (4, 32))

    print(mokfx.explain(compiled, input_ids=ids, labels=ids, use_cache=False))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, twin)]
    for step in range(10):
        losses = []
        for function, optimizer in zip((model, compiled), optimizers, strict=True):
            loss = function(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        print(f"step {step}: eager {losses[0]:.5f}, compiled {losses[1]:.5f}")


if __name__ == "__main__":
    main()
