"""Which spellings plain Dynamo cannot capture in one graph (fullgraph, sizes that depend on data allowed)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spelling import Spelling

SEARCHES = {
    "where_skip_empty": "`if token.shape[0] == 0` asks for the number of an expert's tokens",
    "mask_skip_empty": "`if mask.any()` asks whether an expert has tokens",
    "counts_tolist_skip": "the length of `bincount(...)` depends on data, so its `.tolist()` does",
    "hit_experts": "the loop is as long as the number of experts that were hit",
    "unique_experts": "the loop is as long as the number of experts that were hit",
}
KEEPS_LENGTH = {"grouped_mm", "functional_grouped_mm", "loop_offsets"}
"""Products that ask nothing of the length of the counts."""


def why(s: Spelling) -> str | None:
    """What stands in the way, in a few words; None when one graph comes out."""
    if s.exchange == "listed":
        return "`dist.all_to_all` makes an options object that Dynamo does not know"
    if s.whole:
        return SEARCHES.get(s.whole)
    if s.counts in ("bincount", "bincount_method") and (
        s.products not in KEEPS_LENGTH or s.bias or s.regroup == "split_cat"
    ):
        return "the length of `bincount(..., minlength=E)` depends on data: Dynamo cannot compare it with E"
    return None
