"""Experts divided among ranks: nothing changes but the model, which exchanges its tokens by all-to-all.

torchrun --nproc-per-node 2 examples/expert_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

import mokfx

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 64, 8, 2


class ExpertParallelMoE(nn.Module):
    """This rank holds `EXPERTS / ranks` of the experts, as stacked weights."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.local = EXPERTS // self.ranks
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(self.local, HIDDEN, INTERMEDIATE) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(self.local, INTERMEDIATE, HIDDEN) / INTERMEDIATE**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, EXPERTS).sum(0)

        # How many rows go to each rank, and how many come from each: first the counts travel, then the rows.
        arriving = all_to_all_single(counts, None, None, self.group).view(self.ranks, self.local)
        sent, received = counts.view(self.ranks, self.local).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // TOP_K], received, sent, self.group)

        # Rows arrive by sending rank; the experts want them by expert.
        expert = torch.arange(self.local).repeat(self.ranks)
        regroup = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0]).argsort(stable=True)
        parts = rows[regroup].split(arriving.sum(0).tolist())
        outputs = torch.cat([F.gelu(part @ self.up[e]) @ self.down[e] for e, part in enumerate(parts)])

        # And back.
        outputs = all_to_all_single_autograd(outputs[regroup.argsort()], sent, received, self.group)
        outputs = outputs[order.argsort()].view(-1, TOP_K, HIDDEN)
        return (outputs * weights.unsqueeze(-1)).sum(1)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()

    torch.manual_seed(0)
    model = ExpertParallelMoE(group)
    torch.manual_seed(1 + rank)
    x = torch.randn(16 + 8 * rank, HIDDEN)  # ranks may have different numbers of tokens

    compiled = torch.compile(model, backend="mok", fullgraph=True)
    report = mokfx.explain(compiled, x)
    y = compiled(x)
    y.square().sum().backward()
    difference = (y - model(x)).abs().max().item()

    differences = [torch.zeros(()) for _ in range(group.size())]
    dist.all_gather(differences, torch.tensor(difference))
    if rank == 0:
        print(report)
        print()
        for r, largest in enumerate(differences):
            print(f"rank {r}: {16 + 8 * r} tokens, largest difference to eager {largest.item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
