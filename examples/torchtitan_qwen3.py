"""A Qwen3 MoE model of torchtitan whose blocks its own `apply_compile` compiles with mokfx, trained on a CPU.

In a training job it is a setting: `--compile.backend mok`.

    pip install "mokfx[systems]" && python examples/torchtitan_qwen3.py
"""

import torch
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import model_registry

import mokfx


def small_model() -> nn.Module:
    """Two blocks of torchtitan's debug model, with attention that trains on a CPU."""
    config = model_registry("debugmodel_moe").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.bfloat16()


def main() -> None:
    model = small_model()
    tokens, positions = torch.randint(0, 2048, (2, 33)), torch.arange(32).expand(2, -1)
    print(mokfx.explain(mokfx.compile(model), tokens[:, :-1], positions))

    alone = ParallelDims.from_config(ParallelismConfig(), world_size=1)
    apply_compile(model, compile_config=CompileConfig(enable=True, backend="mok"), parallel_dims=alone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        logits = model(tokens[:, :-1], positions)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
