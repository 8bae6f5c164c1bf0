"""DeepSpeed's MoE layer compiled with mokfx and trained on a CPU: one `mok.moe`, its auxiliary loss kept.

    pip install "mokfx[systems]" && python examples/deepspeed_moe.py
"""

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import mokfx


class FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """An MoE layer as DeepSpeed users write it: the output, the auxiliary loss, and how many tokens each expert got."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.moe = MoE(32, FeedForward(32, 64), num_experts=8, k=4, capacity_factor=1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, auxiliary, counts = self.moe(self.norm(x))
        return x + y, auxiliary, counts


def main() -> None:
    torch.manual_seed(0)
    block, x, wanted = Block(), torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    compiled = mokfx.compile(block, options={"mok.on_miss": "raise"})
    print(mokfx.explain(compiled, x))
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    for step in range(5):
        y, auxiliary, counts = compiled(x)
        loss = F.mse_loss(y, wanted) + 0.01 * auxiliary
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, tokens of each expert {counts.tolist()}")


if __name__ == "__main__":
    main()
