"""`all_spellings()`: well-known layers, and every choice of every stage at least once, varied alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import combine, dispatch, exchange, networks, router
from .capacity import CAPACITY
from .collectives import EXCHANGES
from .experts import LOOPS, PRODUCTS
from .loops import LOOPS as LOOP_LAYERS
from .shared import ADDED, SHARED
from .spelling import Spelling

CHOICES: dict[str, tuple[Any, ...]] = {
    "router": tuple(router.ROUTERS),
    "flatten": tuple(dispatch.FLATTEN),
    "sort": tuple(dispatch.SORT),
    "rows": (*dispatch.ROWS, *dispatch.ROWS_BY_CHOICE),
    "counts": tuple(dispatch.COUNTS),
    "whole": (*LOOP_LAYERS, *CAPACITY),
    "products": tuple(PRODUCTS),
    "act": (*networks.GATED, *networks.UNGATED),
    "fused": ("apart", *networks.SPLIT),
    "up_first": (False, True),
    "storage": ("in_out", "out_in"),
    "bias": (False, True),
    "listed": (False, True),
    "unsort": tuple(combine.UNSORT),
    "reduce": (*combine.REDUCE, *combine.ACCUMULATE),
    "weight_on": ("output", "hidden", "input"),
    "shared": ("", *SHARED),
    "added": (*ADDED, "into"),
    "exchange": tuple(EXCHANGES),
    "count_exchange": tuple(exchange.COUNT_EXCHANGES),
    "splits": tuple(exchange.SPLITS),
    "regroup": (*exchange.REGROUP, *exchange.IDS_SENT),
    "weight_sent": (False, True),
    "outputs": ("y", "y_logits", "y_counts", "y_aux", "y_ids"),
    "batched": (False, True),
}
"""Every value of every field."""

BASES: dict[str, tuple[Spelling, str]] = {
    "sorted": (
        Spelling(sort="sort", products="padded_bmm"),
        "router flatten sort rows products act fused bias unsort reduce weight_on shared outputs batched",
    ),
    "looped": (
        Spelling(storage="out_in", products="loop_split", reduce="index_add_", fused="chunk"),
        "flatten rows counts products added act up_first storage bias listed reduce weight_on",
    ),
    "parallel": (
        Spelling(exchange="functional_autograd", products="padded_bmm", sort="argsort_stable"),
        "flatten counts products reduce weight_on exchange count_exchange splits regroup weight_sent outputs",
    ),
    "searched": (
        Spelling(whole="where_one_hot", storage="out_in"),
        "whole listed fused bias",
    ),
    "capacity": (
        Spelling(whole="einsum_gshard", products="padded_einsum"),
        "whole products bias outputs batched",
    ),
    "parallel_capacity": (
        Spelling(whole="einsum_gshard", products="padded_bmm", exchange="function_recursive"),
        "whole products exchange",
    ),
}
"""Usual layers, and the fields that are varied around each."""

MODELS: dict[str, Spelling] = {
    "mixtral": Spelling(
        router="softmax_topk_renormalised",
        whole="where_one_hot",
        storage="out_in",
        listed=True,
        batched=True,
        outputs="y_logits",
    ),
    "mixtral_hit_experts": Spelling(
        router="softmax_topk_renormalised", whole="hit_experts", storage="out_in", fused="chunk", batched=True
    ),
    "olmoe_grouped": Spelling(
        sort="sort", products="grouped_mm", storage="out_in", fused="chunk", unsort="by_setitem", batched=True
    ),
    "gpt_oss": Spelling(
        router="topk_softmax",
        sort="sort",
        products="grouped_mm",
        act="clamped",
        fused="interleaved",
        bias=True,
        unsort="by_setitem",
        batched=True,
    ),
    "gpt_oss_loop": Spelling(
        router="topk_softmax", whole="where_ids", act="clamped", fused="interleaved", bias=True, batched=True
    ),
    "deepseek_v3": Spelling(
        router="group_limited",
        whole="counts_tolist_skip",
        storage="out_in",
        listed=True,
        shared="linear",
        batched=True,
    ),
    "qwen2_moe": Spelling(
        router="one_hot_aux",
        products="grouped_mm",
        storage="out_in",
        shared="linear_sigmoid",
        outputs="y_aux",
        reduce="index_add",
    ),
    "torchtitan": Spelling(
        router="bias_corrected",
        sort="argsort_stable",
        counts="scatter_sum",
        products="grouped_mm",
        storage="out_in",
        unsort="by_row_setitem",
        shared="linear",
        exchange="functional_autograd",
        count_exchange="counts_no_grad",
        splits="cpu_tolist",
        regroup="index",
        outputs="y_counts",
        batched=True,
    ),
    "llama4": Spelling(
        router="topk_sigmoid",
        products="padded_bmm",
        fused="chunk",
        weight_on="input",
        reduce="scatter_add_",
        shared="linear",
    ),
    "switch": Spelling(
        router="switch_max",
        whole="einsum_switch",
        act="relu",
        products="loop_split",
        storage="out_in",
        listed=True,
        bias=True,
        outputs="y_logits",
    ),
    "gshard": Spelling(
        router="one_hot_aux",
        whole="einsum_gshard",
        act="gelu",
        products="padded_einsum",
        outputs="y_aux",
        exchange="function_recursive",
    ),
    "megatron": Spelling(
        router="sigmoid_topk",
        flatten="t_reshape",
        rows="token_table_repeat",
        counts="bincount",
        storage="out_in",
        products="loop_split",
        fused="torch_chunk",
        reduce="scatter_add",
        exchange="function_recursive",
        regroup="split_cat",
        weight_sent=True,
        weight_on="hidden",
        shared="fused",
    ),
}
"""Layers as well-known models write them; some have a known obstacle (`needs_substitution`)."""


def mended(s: Spelling, field: str, value: Any) -> Spelling:
    """`s` with one choice changed, and what that choice cannot do without changed with it."""
    s = replace(s, **{field: value})
    if s.by_choice and s.rows not in dispatch.ROWS_BY_CHOICE:
        s = replace(s, flatten="view") if field == "rows" else replace(s, rows="modulo")
    elif not s.by_choice and s.rows not in dispatch.ROWS:
        s = replace(s, flatten="t_reshape") if field == "rows" else replace(s, rows="floordiv")
    if s.listed and field == "listed":
        s = replace(s, products="loop_split", storage="out_in")
    if s.act not in networks.GATED:
        s = replace(s, fused="apart")
    if s.whole == "einsum_switch":
        s = replace(s, router="switch_max")
    if s.outputs == "y_aux":
        s = replace(s, router="one_hot_aux")
    if s.weight_on == "hidden" and s.exchange:
        s = replace(s, weight_sent=True)
    if field == "added":
        s = replace(s, shared="linear")
    if s.counts in dispatch.FLOAT_COUNTS:
        s = replace(s, products="grouped_mm", bias=False)
    if s.products not in LOOPS:
        s = replace(s, listed=False)
    return s.canonical()


def all_spellings() -> Iterator[Spelling]:
    """Each once; all are valid. `spelling.id` names a test; `spelling.exchange` tells what needs a group."""
    seen: set[Spelling] = set()
    variations = [
        mended(base, field, value)
        for base, names in BASES.values()
        for field in names.split()
        for value in CHOICES[field]
    ]
    for s in (*MODELS.values(), *(base for base, _ in BASES.values()), *variations):
        if s not in seen and s.problem() is None:
            seen.add(s)
            yield s
