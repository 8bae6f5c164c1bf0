"""A `Spelling` names one choice for each stage of an MoE layer; `Sizes` are the layer's numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import capacity, combine, dispatch, exchange, experts, loops, router


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
    """A per-expert loop (loops.py) or a capacity layer (capacity.py), in place of dispatch, experts and combine."""
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
        """What differs from the defaults, readable: `sort=sort_stable,exchange=plain`; "default" when nothing does."""
        changed = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ",".join(changed) or "default"

    @property
    def by_choice(self) -> bool:
        return self.flatten in dispatch.CHOICE_ORDER

    @property
    def bf16_only(self) -> bool:
        """torch cannot compile this in another dtype."""
        return not self.whole and self.products in experts.GROUPED

    def top_k(self, sizes: Sizes) -> int:
        """How many experts a token really gets."""
        return 1 if self.router in router.ONE_CHOICE else sizes.top_k

    def problem(self) -> str | None:
        """Why these choices cannot be combined, or None when they can."""
        if self.whole in capacity.CAPACITY:
            return self._capacity_problem()
        if (self.rows in dispatch.ROWS_BY_CHOICE) != self.by_choice:
            return "rows are fetched for another slot order"
        gated = self.act in experts.GATED
        if not gated and (self.fused != "apart" or self.up_first):
            return "only a gated network has something to fuse"
        if self.fused == "apart" and self.up_first:
            return "gate and up are apart"
        if self.listed and (self.products not in experts.LOOPS or self.storage != "out_in"):
            return "nn.Linears need a loop, and store [out, in]"
        if self.whole in loops.LOOPS and self.exchange:
            return "a loop over tokens' experts does not exchange"
        if self.exchange and self.weight_on == "hidden" and not self.weight_sent:
            return "the hidden is on another rank than the weight"
        if self.weight_sent and not self.exchange:
            return "nothing is sent"
        if self.regroup in exchange.IDS_SENT and not self.exchange:
            return "nothing is sent"
        if self.outputs == "y_aux" and self.router not in router.WITH_AUX:
            return "the router has no loss"
        if self.weight_on == "hidden" and self.reduce not in ("mul_sum", *combine.ACCUMULATE):
            return "no weight is left for the reduction"
        if (self.weight_on == "input" or self.weight_sent) and self.reduce not in ("mul_sum", *combine.ACCUMULATE):
            return "no weight is left for the reduction"
        return None

    def _capacity_problem(self) -> str | None:
        return capacity.problem(self)
