"""Routers: from tokens [T, H] to expert ids [T, k], their weights [T, k], and what else a model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routed(NamedTuple):
    ids: Tensor
    """[T, k] int64."""
    weights: Tensor
    """[T, k], the dtype of the tokens unless the spelling says otherwise."""
    logits: Tensor
    """[T, E]."""
    aux: Tensor | None = None
    """A scalar load-balancing loss."""


class Router(nn.Module):
    """The parameters that a router spelling may use; `spelling` is a function in `ROUTERS`."""

    correction: Tensor
    table: Tensor
    bias: Any

    def __init__(self, hidden: int, experts: int, top_k: int, spelling: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts, self.top_k, self.groups = experts, top_k, 4
        self.weight = nn.Parameter(torch.randn(experts, hidden, dtype=dtype) / hidden**0.5)
        self.bias = nn.Parameter(torch.randn(experts, dtype=dtype) / 4) if spelling in WITH_BIAS else None
        if spelling in WITH_CORRECTION:
            self.register_buffer("correction", torch.randn(experts, dtype=dtype) / 4)
        if spelling in WITH_TABLE:
            self.register_buffer("table", torch.randint(experts, (64, top_k)))
        self.spelling = ROUTERS[spelling]

    def forward(self, x: Tensor, token_ids: Tensor) -> Routed:
        return self.spelling(self, x, token_ids)


def softmax_topk(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """OLMoE: probabilities over all experts, the k largest, not renormalised."""
    logits = F.linear(x, r.weight)
    weights, ids = torch.topk(F.softmax(logits, dim=-1), r.top_k, dim=-1)
    return Routed(ids, weights, logits)


def softmax_topk_renormalised(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Mixtral: softmax in fp32 (under bf16), renormalised in place, cast back."""
    logits = F.linear(x, r.weight)
    probs = F.softmax(logits, dim=1, dtype=wide(x))
    weights, ids = torch.topk(probs, r.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return Routed(ids, weights.to(x.dtype), logits)


def softmax_topk_divided(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Methods and operators only; renormalised out of place, with an epsilon."""
    logits = x @ r.weight.t()
    top = logits.softmax(-1).topk(r.top_k)
    return Routed(top.indices, top.values / (top.values.sum(-1, keepdim=True) + 1e-9), logits)


def softmax_topk_scaled(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Renormalised with `.div_` and a clamp, then scaled."""
    logits = torch.matmul(x, r.weight.transpose(0, 1))
    weights, ids = torch.softmax(logits, -1).topk(r.top_k, dim=-1, sorted=False)
    weights = weights.div_(weights.sum(-1, keepdim=True).clamp(min=1e-6)) * 2.5
    return Routed(ids, weights, logits)


def topk_softmax(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """gpt-oss: a linear with bias; the k largest logits; softmax over those."""
    logits = F.linear(x, r.weight, r.bias)
    values, ids = torch.topk(logits, r.top_k, dim=-1)
    return Routed(ids, F.softmax(values, dim=1, dtype=values.dtype), logits)


def topk_sigmoid(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Llama 4: the k largest logits, a sigmoid of each."""
    logits = torch.addmm(r.bias, x, r.weight.t())
    values, ids = logits.topk(r.top_k, dim=1)
    return Routed(ids, torch.sigmoid(values.to(wide(x))).to(x.dtype), logits)


def sigmoid_topk(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """torchtitan: sigmoid scores, renormalised with an epsilon."""
    logits = F.linear(x, r.weight)
    scores = torch.sigmoid(logits.to(wide(x)))
    weights, ids = torch.topk(scores, k=r.top_k, dim=1)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routed(ids, weights.to(x.dtype), logits)


def bias_corrected(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """DeepSeek-V3 without groups: a correction decides who is chosen, never the weight."""
    logits = F.linear(x.to(wide(x)), r.weight.to(wide(x)))
    scores = logits.sigmoid()
    ids = torch.topk(scores + r.correction, r.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routed(ids, (weights * 2.5).to(x.dtype), logits)


def group_limited(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """DeepSeek-V3: half of the groups, ranked by the sum of their two best, then the k best in those."""
    scores = torch.matmul(x, r.weight.t()).sigmoid()
    biased = scores + r.correction.unsqueeze(0)
    grouped = biased.view(-1, r.groups, r.experts // r.groups)
    group_scores = grouped.topk(2, dim=-1)[0].sum(dim=-1)
    group_ids = torch.topk(group_scores, k=r.groups // 2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, group_ids, 1)
    allowed = mask.unsqueeze(-1).expand_as(grouped).reshape(-1, r.experts)
    ids = torch.topk(biased.masked_fill(~allowed.bool(), float("-inf")), k=r.top_k, dim=-1, sorted=False)[1]
    weights = torch.gather(scores, 1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return Routed(ids, weights * 1.5, scores)


def wide_router(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """A router kept in fp32 under bf16, whose weights stay in fp32 as far as the combine."""
    logits = F.linear(x.to(wide(x)), r.weight.to(wide(x)))
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), r.top_k)
    return Routed(ids, weights / weights.sum(-1, keepdim=True), logits)


def one_hot_aux(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Mixtral's load-balancing loss, by one_hot."""
    logits = F.linear(x, r.weight)
    probs = F.softmax(logits, dim=-1)
    weights, ids = torch.topk(probs, r.top_k, dim=-1)
    chosen = F.one_hot(ids, r.experts).to(probs.dtype)
    aux = (chosen.mean(dim=0) * probs.mean(dim=0).unsqueeze(0)).sum() * r.experts
    return Routed(ids, weights / weights.sum(dim=-1, keepdim=True), logits, aux)


def z_loss(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Counts by scatter for the balance loss, and a loss on the size of the logits."""
    logits = F.linear(x, r.weight, r.bias)
    probs = logits.softmax(dim=-1)
    weights, ids = probs.topk(r.top_k, dim=-1)
    load = torch.zeros_like(probs).scatter_(1, ids, 1.0).mean(0)
    aux = r.experts * torch.sum(load * probs.mean(0)) + 1e-3 * torch.logsumexp(logits, dim=-1).square().mean()
    return Routed(ids, weights, logits, aux)


def switch_max(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Switch: one choice, by max."""
    logits = F.linear(x, r.weight)
    weight, index = torch.max(logits.softmax(dim=-1), dim=-1)
    return Routed(index.unsqueeze(-1), weight.unsqueeze(-1), logits)


def switch_argmax(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Switch: one choice, by argmax and gather."""
    logits = F.linear(x, r.weight)
    probs = torch.softmax(logits, dim=-1)
    ids = probs.argmax(dim=-1, keepdim=True)
    return Routed(ids, probs.gather(-1, ids), logits)


def given_ids(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """Hash layers: a table decides the experts, the router only weighs them."""
    ids = r.table[token_ids]
    logits = F.linear(x, r.weight)
    return Routed(ids, logits.gather(1, ids).softmax(-1), logits)


def hashed_ids(r: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """The ids are arithmetic on the token's number."""
    choice = torch.arange(r.top_k, device=x.device)
    ids = (token_ids.unsqueeze(1) * 7 + choice * 3) % r.experts
    logits = F.linear(x, r.weight)
    return Routed(ids, torch.gather(logits.sigmoid(), 1, ids), logits)


def wide(x: Tensor) -> torch.dtype:
    """fp32 under low precision; float64 stays, so that the oracle's tolerance can be tight."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


ROUTERS: dict[str, Callable[[Router, Tensor, Tensor], Routed]] = {
    f.__name__: f
    for f in (
        softmax_topk,
        softmax_topk_renormalised,
        softmax_topk_divided,
        softmax_topk_scaled,
        topk_softmax,
        topk_sigmoid,
        sigmoid_topk,
        bias_corrected,
        group_limited,
        wide_router,
        one_hot_aux,
        z_loss,
        switch_max,
        switch_argmax,
        given_ids,
        hashed_ids,
    )
}
WITH_BIAS = {"topk_softmax", "topk_sigmoid", "z_loss"}
WITH_CORRECTION = {"bias_corrected", "group_limited"}
WITH_TABLE = {"given_ids"}
WITH_AUX = {"one_hot_aux", "z_loss"}
ONE_CHOICE = {"switch_max", "switch_argmax"}
"""These choose one expert a token whatever `top_k` says."""
REPEATING = {"given_ids", "hashed_ids"}
"""These may choose one expert twice for a token."""
