"""MoE layers as people write them for eager mode: loops, counts on the host, and tests for emptiness."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, INNER = 4, 2, 6, 5


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, INNER), nn.Linear(H, INNER), nn.Linear(INNER, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class EarlyExpert(Expert):
    """Returns early when it has no token."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x
        return super().forward(x)


class Layer(nn.Module):
    """A router, experts as modules and as stacked weights, and the names that the loops below use."""

    expert: type[Expert] = Expert

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(self.expert() for _ in range(E))
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, H) / 3)
        self.down_proj = nn.Parameter(torch.randn(E, H, INNER) / 3)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = F.softmax(self.router(x), dim=-1).topk(K, dim=-1)
        return weights, ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return self.layer(x, ids, weights)

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


class HitTensorRows(Layer):
    """As the eager experts of transformers: each row of `nonzero()` is a tensor that indexes stacked
    weights."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            expert_mask = F.one_hot(ids, num_classes=self.num_experts + 1).permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            gate, up = F.linear(x[token_idx], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, self.down_proj[expert_idx])
            hidden = hidden * weights[token_idx, top_k_pos, None]
            final.index_add_(0, token_idx, hidden.to(final.dtype))
        return final


class HitRowsOfAWiderMask(Layer):
    """The mask has a row more than there are experts, and nothing passes over it: no id that top-k finds can be
    that."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for expert_idx in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1):
            top_k_pos, token_idx = torch.where(mask[expert_idx])
            gate, up = F.linear(x[token_idx], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, self.down_proj[expert_idx])
            final.index_add_(0, token_idx, hidden * weights[token_idx, top_k_pos, None])
        return final


class HitModules(Layer):
    """The row is used as the index of a module list."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        hit = mask.sum(dim=(1, 2)) > 0
        for e in torch.where(hit)[0]:
            choice, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, choice, None])
        return out


class HitList(Layer):
    """The rows as Python numbers; the sum grows by setitem."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hit = torch.bincount(ids.flatten(), minlength=E).gt(0)
        for e in hit.nonzero(as_tuple=True)[0].tolist():
            token, choice = torch.where(ids == e)
            out[token] += self.experts[e](x[token]) * weights[token, choice, None]
        return out


class HitNumbers(Layer):
    """The rows as Python numbers, through a name; the sum grows out of place."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hit = torch.zeros(E, dtype=torch.long).scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
        numbers = hit.nonzero().flatten().tolist()
        for e in numbers:
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, choice, None])
        return out


class EveryExpertOrSkip(Layer):
    """All experts, and `continue` for those without a token."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return out


class OnlyIfAny(Layer):
    """The expert runs inside `if len(...) > 0`."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if len(token) > 0:
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, choice, None])
        return out


class SortedCounts(Layer):
    """As DeepSeek's inference code: counts on the host, a running offset, a list of outputs that is
    concatenated."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        tokens = x[order // K]
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        outputs = []
        start = 0
        for e, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[e](tokens[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) else tokens.new_empty(0)
        slots = torch.empty_like(outs)
        slots[order] = outs
        return (slots.view(*ids.shape, H) * weights.unsqueeze(-1)).sum(1)


class SplitCounts(Layer):
    """Rows split by `bincount(...).tolist()`, every expert run on its part, empty or not."""

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        parts = x[order // K].split(counts)
        outs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        slots = torch.empty_like(outs)
        slots[order] = outs
        return (slots.view(*ids.shape, H) * weights.unsqueeze(-1)).sum(1)


class EarlyReturn(SplitCounts):
    """The same with experts that return early."""

    expert = EarlyExpert


class DummyRow(Layer):
    """As the expert-parallel layer of transformers: without rows, the experts run on a dummy row that is cut
    off."""

    def experts_forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.bmm(self.gate_up_proj[ids[:, 0]], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = hidden.chunk(2, dim=-1)
        down = torch.bmm(self.down_proj[ids[:, 0]], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return down * weights

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        tokens = torch.cat(x[order // K].split(counts))
        expert_ids = torch.cat(ids.flatten()[order].split(counts))[:, None]
        ones = torch.ones_like(expert_ids, dtype=tokens.dtype)
        if tokens.shape[0] == 0:
            # Keep the graph connected to the experts' weights.
            expert_output = self.experts_forward(
                tokens.sum(dim=0, keepdim=True), expert_ids.new_zeros((1, 1)), ones.new_ones((1, 1))
            )[:0]
        else:
            expert_output = self.experts_forward(tokens, expert_ids, ones)
        slots = torch.empty_like(expert_output)
        slots[order] = expert_output
        return (slots.view(*ids.shape, H) * weights.unsqueeze(-1)).sum(1)


LOOPS = [HitTensorRows, HitRowsOfAWiderMask, HitModules, HitList, HitNumbers]
BRANCHES = [EveryExpertOrSkip, OnlyIfAny, SortedCounts, EarlyReturn]


def tokens_for(layer: Layer, *, experts: int, count: int = 12) -> Tensor:
    """[count, H] tokens that the layer's router sends to the first `experts` experts, each of which gets
    some."""
    torch.manual_seed(1)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(E, H) * 8)
    x = torch.randn(count, H)
    x[:, experts:E] = -20
    for row in range(count):
        x[row, row % experts] += 3
        x[row, (row + 1) % experts] += 3
    return x
