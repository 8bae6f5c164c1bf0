"""A `Spelling` names one choice for each stage of an MoE layer; `Sizes` are the layer's numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from . import (
    capacity,
    collectives,
    combine,
    dispatch,
    experts,
    loops,
    networks,
    router,
    substitution,
)


@dataclass(frozen=True)
class Sizes:
    tokens: int = 16
    hidden: int = 16
    intermediate: int = 24
    experts: int = 8
    top_k: int = 2
    shared: int = 40


@dataclass(frozen=True)
class Spelling:
    """How one MoE layer is written. The defaults are the commonest choice of each stage."""

    router: str = "softmax_topk"
    flatten: str = "view"
    sort: str = "argsort"
    rows: str = "floordiv"
    counts: str = "histc"
    whole: str = ""
    """A loop (loops.py) or a capacity layer (capacity.py) in place of dispatch and combine."""
    products: str = "loop_split"
    act: str = "silu_mul"
    fused: str = "apart"
    up_first: bool = False
    storage: str = "in_out"
    bias: bool = False
    listed: bool = False
    unsort: str = "by_argsort"
    reduce: str = "mul_sum"
    weight_on: str = "output"
    """output | hidden | input"""
    shared: str = ""
    added: str = "after"
    """How the shared output joins the sum: after | before | in_place | into (shared.py)."""
    exchange: str = ""
    """A form of collectives.py; "" on one rank."""
    count_exchange: str = "counts_no_grad"
    splits: str = "tolist"
    regroup: str = "argsort"
    weight_sent: bool = False
    """The router weight travels with its row, and is applied by the receiver."""
    outputs: str = "y"
    """y | y_logits | y_counts | y_aux | y_ids"""
    batched: bool = False
    """The layer's input is [batch, sequence, H]."""

    @property
    def id(self) -> str:
        """What differs from the defaults: `sort=sort_stable,exchange=plain`; "default" when nothing does."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{name}={value}" for name, value in values.items()) or "default"

    @property
    def by_choice(self) -> bool:
        """Slots are numbered choice by choice."""
        return self.flatten in dispatch.CHOICE_ORDER

    @property
    def bf16_only(self) -> bool:
        """torch cannot compile this in another dtype."""
        return self.products in experts.GROUPED

    @property
    def cut_in_eager(self) -> bool:
        """Eager autograd loses gradients here that compiled code has."""
        return self.exchange in collectives.CUT_IN_EAGER

    @property
    def needs_substitution(self) -> bool:
        """Plain Dynamo cannot capture this in one graph, even when data may decide sizes."""
        return substitution.why(self) is not None

    def top_k(self, sizes: Sizes) -> int:
        """How many experts a token really gets."""
        if self.router in router.ONE_CHOICE:
            return 1
        return capacity.TOP_K.get(self.whole, sizes.top_k)

    def problem(self) -> str | None:
        """Why these choices cannot be combined, or None when they can."""
        return self._network_problem() or self._flow_problem() or self._unused_problem()

    def _network_problem(self) -> str | None:
        if self.act not in networks.GATED and self.fused != "apart":
            return "only a gated network has something to fuse"
        if self.fused == "apart" and self.up_first:
            return "gate and up are apart"
        if self.listed and (self.products not in experts.LOOPS or self.storage != "out_in"):
            return "nn.Linears need a loop, and store [out, in]"
        return None

    def _flow_problem(self) -> str | None:
        early = self.weight_sent or self.weight_on != "output"
        if (self.rows in dispatch.ROWS_BY_CHOICE) != self.by_choice:
            return "rows are fetched for another slot order"
        if self.exchange and self.weight_on == "hidden" and not self.weight_sent:
            return "the hidden is on another rank than the weight"
        if early and self.reduce not in ("mul_sum", *combine.ACCUMULATE):
            return "no weight is left for the reduction"
        if self.outputs == "y_aux" and self.router not in router.WITH_AUX:
            return "the router has no loss"
        if capacity.TOP_K.get(self.whole, 1) != 1 and self.router in router.ONE_CHOICE:
            return "the router makes another number of choices"
        if self.whole in capacity.CAPACITY and self.products not in (*experts.BATCHED, "loop_split"):
            return "buckets want a batched product or a loop"
        if self.added == "into" and (self.whole or self.reduce not in combine.ACCUMULATE):
            return "nothing is accumulated"
        floats = self.counts in dispatch.FLOAT_COUNTS
        if floats and (self.exchange or self.bias or self.products not in experts.GROUPED):
            return "the counts are floats"
        if self.whole in loops.LOOPS and (self.exchange or self.products != "loop_split"):
            return "a search for tokens does not exchange, and has one expert at a time"
        if self.whole in loops.STACKED_ONLY and self.listed:
            return "the experts are indexed by a tensor"
        wants_distinct = self.whole in loops.DISTINCT_ONLY or self.counts in dispatch.COUNTS_OF_DISTINCT
        if wants_distinct and self.router in router.REPEATING:
            return "a token's experts must differ"
        return None

    def _unused_problem(self) -> str | None:
        used = self.canonical()
        for f in fields(self):
            if getattr(self, f.name) != getattr(used, f.name):
                return f"{f.name} has no part in this layer"
        return None

    def canonical(self) -> Spelling:
        """The same layer, with the defaults for all choices that have no part in it."""
        unused: list[str] = []
        if self.whole:
            unused += ["flatten", "sort", "rows", "counts", "unsort", "reduce", "weight_on", "weight_sent"]
        if self.whole or not self.exchange:
            unused += ["count_exchange", "splits", "regroup", "weight_sent"]
        if not self.shared:
            unused += ["added"]
        if self.reduce in combine.ACCUMULATE:
            unused += ["unsort"]
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in unused}
        return replace(self, **defaults)
