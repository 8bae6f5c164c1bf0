"""Factories of models whose pages are looked at: `mokfx explain tests/page/models.py:deepseek_like`."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

Made = tuple[nn.Module, tuple[Any, ...]]


class Gate(nn.Module):
    """Sigmoid scores, a bias that only the choice sees, the best groups first, weights that add up to `scale`."""

    bias: Tensor

    def __init__(self, hidden: int, experts: int, top_k: int, groups: int = 4, scale: float = 2.5) -> None:
        super().__init__()
        self.top_k, self.groups, self.scale = top_k, groups, scale
        self.weight = nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        corrected = (scores + self.bias).view(x.shape[0], self.groups, -1)
        best = corrected.topk(2, dim=-1).values.sum(-1).topk(self.groups // 2, dim=-1).indices
        closed = torch.ones(best.shape[0], self.groups, dtype=torch.bool, device=x.device).scatter(1, best, False)
        allowed = corrected.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        ids = allowed.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * self.scale


class Expert(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertParallel(nn.Module):
    """Routed experts divided among the ranks of a group, and a shared expert on each."""

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks, self.top_k = group, group.size(), top_k
        self.experts, self.local = experts, experts // group.size()
        self.gate = Gate(hidden, experts, top_k)
        self.w1 = nn.Parameter(torch.randn(self.local, hidden, 2 * intermediate) / hidden**0.5)
        self.w2 = nn.Parameter(torch.randn(self.local, intermediate, hidden) / intermediate**0.5)
        self.shared_expert = Expert(hidden, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, shape[-1])
        ids, weights = self.gate(x)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        arriving = all_to_all_single(counts, None, None, self.group).view(self.ranks, self.local)
        sent, received = counts.view(self.ranks, self.local).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // self.top_k], received, sent, self.group)
        expert = torch.arange(self.local).repeat(self.ranks)
        regroup = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0]).argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).int()
        gate, up = torch._grouped_mm(rows[regroup], self.w1, offs=ends).chunk(2, dim=-1)
        outputs = torch._grouped_mm(F.silu(gate) * up, self.w2, offs=ends)
        outputs = all_to_all_single_autograd(outputs[regroup.argsort()], sent, received, self.group)
        outputs = outputs[order.argsort()].view(-1, self.top_k, shape[-1])
        routed = (outputs.float() * weights.unsqueeze(-1)).sum(1).type_as(x)
        return (routed + self.shared_expert(x)).view(shape)


class Loop(nn.Module):
    """One rank: sort, loop over the experts, put back, sum. `between` is what happens to their outputs."""

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, intermediate) for _ in range(experts))

    def between(self, rows: Tensor) -> Tensor:
        return rows

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, len(self.experts)).sum(0).tolist()
        parts = x[order // self.top_k].split(counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        rows = self.between(rows)[order.argsort()].view(-1, self.top_k, x.shape[-1])
        return (rows * weights.unsqueeze(-1)).sum(1)


class RunningSum(Loop):
    def between(self, rows: Tensor) -> Tensor:
        return torch.cumsum(rows, 0)


class ExpertChoice(nn.Module):
    """Experts choose their tokens, which is another layer than the op computes."""

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, intermediate) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, intermediate, hidden) / intermediate**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.router(x).softmax(-1).t().topk(x.shape[0] // 4, dim=-1)
        rows = torch.bmm(F.gelu(torch.bmm(x[tokens], self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens.flatten(), rows.flatten(0, 1))


class Blocks(nn.Module):
    """Layers one after the other, each with a norm before it and a residual around it."""

    def __init__(self, hidden: int, *layers: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in layers)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


_group = ExitStack()


def group_of(ranks: int) -> dist.ProcessGroup:
    """A group whose other ranks are not there: each would send what this one sends.

    `torch`'s fake group leaves what is received as it finds it in memory, which no split sizes can be read from.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    _group.callback(dist.destroy_process_group)
    library = _group.enter_context(torch.library._scoped_library("_c10d_functional", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*overrid")  # on purpose
        library.impl("all_to_all_single", lambda sent, *splits_and_group: sent.clone(), "CompositeExplicitAutograd")
    group = dist.group.WORLD
    assert group is not None
    return group


def leave_group() -> None:
    """Undo `group_of`."""
    _group.close()


def deepseek_like() -> Made:
    """What rank 0 of eight compiles."""
    layer = ExpertParallel(512, 256, 64, 8, group_of(8)).bfloat16()
    return layer, (torch.randn(4, 128, 512, dtype=torch.bfloat16),)


def match_and_misses() -> Made:
    layers = (Loop(64, 96, 8, 2), RunningSum(64, 96, 8, 2), ExpertChoice(64, 96, 8))
    return Blocks(64, *layers), (torch.randn(64, 64),)


def misses_only() -> Made:
    return RunningSum(64, 96, 8, 2), (torch.randn(64, 64),)


def dense() -> Made:
    return Blocks(64, Expert(64, 96), Expert(64, 96)), (torch.randn(64, 64),)


def two_layers() -> Made:
    """Of any number of tokens."""
    x = torch.randn(24, 32)
    torch._dynamo.mark_dynamic(x, 0)
    return Blocks(32, *(Loop(32, 48, 4, 2) for _ in range(2))), (x,)


def many_layers() -> Made:
    return Blocks(32, *(Loop(32, 48, 4, 2) for _ in range(24))), (torch.randn(32, 32),)
