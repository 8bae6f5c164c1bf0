"""Compose a `Spelling` into a layer: `build(spelling, sizes, group, dtype)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import exchange
from .capacity import CAPACITY
from .collectives import EXCHANGES
from .combine import combine
from .dispatch import COUNTS, COUNTS_OF_CHOICES, COUNTS_OF_SORTED, FLATTEN, ROWS, ROWS_BY_CHOICE, SORT
from .experts import Experts
from .loops import LOOPS
from .router import Routed, Router
from .shared import ADDED, Shared
from .spelling import Sizes, Spelling

Tap = Callable[..., Any]
"""`tap(layer, value, **what else is known there)`, the value to go on with: how faults are planted."""


class MoE(nn.Module):
    """`layer(x, token_ids)`: x [T, H] (or [B, T / B, H]), token_ids [T] int64 (most routers ignore them).

    Returns y like x, or (y, one more value) as `spelling.outputs` says.
    """

    def __init__(
        self,
        spelling: Spelling,
        sizes: Sizes,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        rank: int,
        ranks: int,
    ) -> None:
        super().__init__()
        s = self.spelling = spelling
        self.sizes, self.dtype = sizes, dtype
        self.group: Any = group  # None on one rank, where nothing asks for it
        self.rank, self.ranks = rank, ranks
        self.form: Any = EXCHANGES.get(s.exchange)
        self.form_back: Any = self.form
        self.group_back: Any = self.group
        self.taps: dict[str, Tap] = {}
        self.experts, self.top_k = sizes.experts, s.top_k(sizes)
        self.router = Router(sizes.hidden, sizes.experts, self.top_k, s.router, dtype)
        self.ffn = Experts(
            sizes.experts // self.ranks,
            sizes.hidden,
            sizes.intermediate,
            rank=self.rank,
            ranks=self.ranks,
            act=s.act,
            fused=s.fused,
            up_first=s.up_first,
            storage=s.storage,
            bias=s.bias,
            listed=s.listed,
            products=s.products,
            dtype=dtype,
        )
        self.shared = Shared(sizes.hidden, sizes.shared, s.shared, dtype) if s.shared else None

    def forward(self, x: Tensor, token_ids: Tensor) -> Any:
        s, shape = self.spelling, x.shape
        if s.batched:
            x = x.view(-1, shape[-1])
        routed = self.tap("routed", self.router(x, token_ids))
        if s.whole in CAPACITY:
            y = CAPACITY[s.whole](self, x, routed)
        elif s.whole in LOOPS:
            y = LOOPS[s.whole](self, x, routed)
        else:
            y = self.sorted_experts(x, routed)
        y = self.tap("combined", y.to(x.dtype), x=x, routed=routed)
        if self.shared is not None and s.added != "into":
            y = ADDED[s.added](y, self.shared(x))
        if s.batched:
            y = y.reshape(shape)
        return self.tap("result", self.outputs(y, routed))

    def tap(self, stage: str, value: Any, **known: Any) -> Any:
        """The value itself, but where a fault is planted at this stage."""
        return self.taps[stage](self, value, **known) if stage in self.taps else value

    def sorted_experts(self, x: Tensor, routed: Routed) -> Tensor:
        """Dispatch by sorting, the experts (perhaps elsewhere), combine."""
        s, k = self.spelling, self.top_k
        flat = FLATTEN[s.flatten](routed.ids)
        order = self.tap("order", SORT[s.sort](flat), flat=flat, routed=routed)
        rows = (ROWS_BY_CHOICE if s.by_choice else ROWS)[s.rows](x, order, k)
        rows = self.tap("rows", rows, x=x, order=order)
        counted = routed.ids if s.counts in COUNTS_OF_CHOICES else flat
        counted = flat[order] if s.counts in COUNTS_OF_SORTED else counted
        counts = COUNTS[s.counts](self.tap("counted", counted), self.experts)
        early = s.weight_sent or s.weight_on != "output"
        weight = None
        if early:
            flat_weights = routed.weights.t().reshape(-1) if s.by_choice else routed.weights.reshape(-1)
            weight = flat_weights[order].unsqueeze(-1)
            if s.weight_on == "input" and not s.weight_sent:
                rows, weight = (rows * weight).to(x.dtype), None
        if s.exchange:
            rows, weight, sent = exchange.send(
                rows,
                weight,
                flat[order],
                counts,
                form=self.form,
                count_exchange=s.count_exchange,
                splits=s.splits,
                regroup=s.regroup,
                group=self.group,
            )
            counts = sent.counts
        if weight is not None and s.weight_on == "input":
            rows = (rows * weight).to(x.dtype)
        out = self.run_experts(rows, counts, weight if s.weight_on == "hidden" else None)
        if weight is not None and s.weight_on == "output":
            out = (out * weight).to(x.dtype)
        out = self.tap("out", out, rows=rows, counts=counts)
        if s.exchange:
            out = exchange.send_back(out, sent, form=self.form_back, regroup=s.regroup, group=self.group_back)
        out = self.tap("returned", out, x=x, order=order, routed=routed)
        order = self.tap("back_order", order)
        return combine(
            s.unsort,
            s.reduce,
            out,
            order,
            None if early else routed.weights,
            x.shape[0],
            k,
            by_choice=s.by_choice,
            start=self.shared(x) if self.shared is not None and s.added == "into" else None,
        )

    def run_experts(self, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
        if "no_grad" in self.taps:
            with torch.no_grad():
                return self.ffn(rows, counts, weight)
        return self.ffn(rows, counts, weight)

    def outputs(self, y: Tensor, routed: Routed) -> Any:
        kind = self.spelling.outputs
        if kind == "y_logits":
            return y, routed.logits
        if kind == "y_counts":
            return y, COUNTS["one_hot_sum"](routed.ids, self.experts)
        if kind == "y_aux":
            return y, routed.aux
        if kind == "y_ids":
            return y, routed.ids
        return y

    def example(self, tokens: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs for `forward`: x that wants a gradient, and token ids."""
        generator = torch.Generator().manual_seed(seed)
        tokens = self.sizes.tokens if tokens is None else tokens
        x = torch.randn(tokens, self.sizes.hidden, generator=generator, dtype=torch.float64).to(self.dtype)
        if self.spelling.batched:
            x = x.view(2, tokens // 2, self.sizes.hidden)
        return x.requires_grad_(), torch.randint(64, (tokens,), generator=generator)


def build(
    spelling: Spelling,
    sizes: Sizes | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    rank: int | None = None,
    ranks: int | None = None,
) -> MoE:
    """The layer that `spelling` describes, with weights from `seed`.

    The ranks of a group get the router of that seed and their blocks of its experts (`rank` and `ranks` build
    another rank's layer, whose parameters a test may want to know).

    Raises:
        ValueError: the choices cannot be combined (`Spelling.problem` says why), or a group is missing.
    """
    if (problem := spelling.problem()) is not None:
        raise ValueError(f"{spelling.id}: {problem}")
    if not spelling.exchange:
        rank, ranks = 0, 1
    elif group is None and ranks is None:
        raise ValueError(f"{spelling.id} exchanges, so it needs a process group")
    rank = dist.get_rank(group) if rank is None else rank
    ranks = dist.get_world_size(group) if ranks is None else ranks
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MoE(spelling, sizes or Sizes(), group, dtype, rank, ranks)
