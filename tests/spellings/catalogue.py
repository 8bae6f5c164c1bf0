"""`all_spellings()`: every choice of every stage at least once, each varied alone around three usual layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import combine, dispatch, exchange, networks, router
from .collectives import EXCHANGES
from .experts import LOOPS, PRODUCTS
from .shared import SHARED
from .spelling import Spelling

TORCHLIKE = Spelling(
    router="softmax_topk_renormalised", sort="sort", counts="bincount", products="padded_bmm", reduce="mul_sum",
)
"""Sorted slots, a grouped product, unsort, weighted sum; one rank."""
LOOPED = Spelling(storage="out_in", listed=True, products="loop_split", reduce="index_add_", batched=True)
"""A loop over nn.Linears, added into place; one rank."""
PARALLEL = Spelling(exchange="functional_autograd", products="padded_bmm", sort="argsort_stable")
"""Exchanged; any number of ranks."""
BASES = {"torchlike": TORCHLIKE, "looped": LOOPED, "parallel": PARALLEL}

CHOICES: dict[str, tuple[Any, ...]] = {
    "router": tuple(router.ROUTERS),
    "flatten": tuple(dispatch.FLATTEN),
    "sort": tuple(dispatch.SORT),
    "rows": (*dispatch.ROWS, *dispatch.ROWS_BY_CHOICE),
    "counts": tuple(dispatch.COUNTS),
    "products": tuple(PRODUCTS),
    "act": (*networks.GATED, *networks.UNGATED),
    "fused": ("apart", *networks.SPLIT),
    "storage": ("in_out", "out_in"),
    "bias": (False, True),
    "unsort": tuple(combine.UNSORT),
    "reduce": (*combine.REDUCE, *combine.ACCUMULATE),
    "weight_on": ("output", "hidden", "input"),
    "shared": ("", *SHARED),
    "outputs": ("y", "y_logits", "y_counts", "y_aux", "y_ids"),
    "batched": (False, True),
}
"""Every value of every field that makes sense on one rank, and with an exchange."""
EXCHANGE_CHOICES: dict[str, tuple[Any, ...]] = {
    "exchange": tuple(EXCHANGES),
    "count_exchange": tuple(exchange.COUNT_EXCHANGES),
    "splits": tuple(exchange.SPLITS),
    "regroup": (*exchange.REGROUP, *exchange.IDS_SENT),
    "weight_sent": (False, True),
}


def mended(s: Spelling, field: str, value: Any) -> Spelling:
    """`s` with one choice changed, and what that choice cannot do without changed with it."""
    s = replace(s, **{field: value})
    if s.by_choice and s.rows not in dispatch.ROWS_BY_CHOICE:
        s = replace(s, rows="modulo") if field != "rows" else replace(s, flatten="view")
    elif not s.by_choice and s.rows not in dispatch.ROWS:
        s = replace(s, flatten="t_reshape") if field == "rows" else replace(s, rows="floordiv")
    if s.listed and (s.products not in LOOPS or s.storage != "out_in"):
        s = replace(s, listed=False)
    if s.act not in networks.GATED:
        s = replace(s, fused="apart")
    if s.outputs == "y_aux" and s.router not in router.WITH_AUX:
        s = replace(s, router="one_hot_aux")
    if s.weight_on == "hidden" and s.exchange:
        s = replace(s, weight_sent=True)
    return s


def all_spellings() -> Iterator[Spelling]:
    """Each once; all are valid. Use `spelling.id` as the test's id, `spelling.exchange` to tell what needs a group."""
    seen: set[Spelling] = set()
    for base in BASES.values():
        choices = {**CHOICES, **EXCHANGE_CHOICES} if base.exchange else CHOICES
        for s in (base, *(mended(base, field, v) for field, values in choices.items() for v in values)):
            if s not in seen and s.problem() is None:
                seen.add(s)
                yield s
