"""Compile an ordinary MoE model, see what was recognised, compare with eager, train. One rank, no GPU.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mokfx


class MoE(nn.Module):
    """Top-k of the SwiGLU experts, as one might write it: sort the tokens by expert, loop, weigh, sum."""

    def __init__(self, hidden: int, intermediate: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.gate = nn.ModuleList(nn.Linear(hidden, intermediate, bias=False) for _ in range(num_experts))
        self.up = nn.ModuleList(nn.Linear(hidden, intermediate, bias=False) for _ in range(num_experts))
        self.down = nn.ModuleList(nn.Linear(intermediate, hidden, bias=False) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = F.softmax(self.router(x), dim=-1).topk(self.top_k)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, self.num_experts).sum(0).tolist()
        outputs = []
        for e, rows in enumerate(x[order // self.top_k].split(counts)):
            outputs.append(self.down[e](F.silu(self.gate[e](rows)) * self.up[e](rows)))
        outputs = torch.cat(outputs)[order.argsort()].view(-1, self.top_k, x.shape[-1])
        return (outputs * weights.unsqueeze(-1)).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.moe = MoE(hidden=64, intermediate=128, num_experts=8, top_k=2)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.moe(self.norm(x))).squeeze(-1)


def make() -> tuple[Model, tuple[Tensor]]:
    """For `mokfx explain examples/quickstart.py:make`, and for `mokfx check`."""
    return Model(), (torch.randn(256, 64),)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    x, target = torch.randn(256, 64), torch.randn(256)

    # fullgraph=True lets the compiler capture sizes that depend on data (`counts.tolist()`);
    # mokfx.compile(model) does so too, and does not insist on one graph.
    compiled = torch.compile(model, backend="mok", fullgraph=True)

    # What was recognised, and the graph that is compiled now.
    report = mokfx.explain(compiled, x)
    print(report)
    print()
    print(report.graph_after)

    print()
    print(f"largest difference to eager: {(compiled(x) - model(x)).abs().max().item():.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(compiled(x), target)
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
