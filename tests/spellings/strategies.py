"""hypothesis strategies: a random valid `Spelling`, and one with a fault that has an effect on it.

Draws are by construction, not by filtering: a choice is only offered where it has a part.
"""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import combine, dispatch, exchange, experts, loops, networks, router
from .capacity import CAPACITY
from .catalogue import CHOICES
from .faults import FAULTS, Fault
from .shared import ADDED, SHARED
from .spelling import Spelling
from .substitution import why

T = TypeVar("T")
FIXED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
"""The same draws on every run; use as `@settings(FIXED, max_examples=n)`."""


def sample(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """About `count` draws, the same on every run, for tests that want a list: to send to other ranks, say."""
    drawn: list[T] = []

    @settings(FIXED, max_examples=count)
    @given(strategy)
    def collect(value: T) -> None:
        drawn.append(value)

    collect()
    return drawn


def _of(field: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(CHOICES[field])


@st.composite
def spellings(
    draw: st.DrawFn, *, exchanged: bool | None = None, whole: bool | None = None, capturable: bool = True
) -> Spelling:
    """A composed layer.

    Args:
        exchanged: with an exchange, without, or either.
        whole: a loop or capacity layer, a sorting one, or either.
        capturable: only what plain Dynamo captures in one graph.
    """
    exchanged = draw(st.booleans()) if exchanged is None else exchanged
    whole = draw(st.sampled_from((False, False, True))) if whole is None else whole
    fields: dict[str, Any] = {
        name: draw(_of(name)) for name in ("router", "act", "storage", "bias", "batched", "outputs")
    }
    fields["shared"] = draw(st.sampled_from(("", "", *SHARED)))
    fields.update(draw(_whole(exchanged) if whole else _sorted(exchanged)))
    if exchanged:
        fields["exchange"] = draw(st.sampled_from([f for f in CHOICES["exchange"] if f != "listed"]))
        if fields["exchange"].startswith("function_") and fields.get("splits") == "item":
            # Dynamo loses the `int(...)` of a split inside some autograd.Functions ("Argument 'sym_int_2' of
            # Node 'output_1' does not belong to this Graph"): which ones, no single stage decides.
            fields["splits"] = "item_of_sums"
    if fields["act"] in networks.GATED:
        fields["fused"] = draw(_of("fused"))
        fields["up_first"] = fields["fused"] != "apart" and draw(st.booleans())
    if (
        fields["products"] in experts.LOOPS
        and fields.get("whole") not in loops.STACKED_ONLY
        and draw(st.booleans())
    ):
        fields.update(listed=True, storage="out_in")
    if fields["shared"]:
        into = ("into",) if fields.get("reduce") in combine.ACCUMULATE else ()
        fields["added"] = draw(st.sampled_from((*ADDED, *into)))
    if fields.get("counts") in dispatch.FLOAT_COUNTS:
        fields["bias"] = False
    if fields["outputs"] == "y_aux":
        fields["router"] = draw(st.sampled_from(sorted(router.WITH_AUX)))
    if fields.get("whole") == "einsum_gshard" and fields["router"] in router.ONE_CHOICE:
        fields["router"] = "softmax_topk"
    wants_distinct = (
        fields.get("whole") in loops.DISTINCT_ONLY or fields.get("counts") in dispatch.COUNTS_OF_DISTINCT
    )
    if wants_distinct and fields["router"] in router.REPEATING:
        fields["router"] = "sigmoid_topk"
    s = Spelling(**fields).canonical()
    if capturable and why(s) is not None:
        s = Spelling(**{**fields, "counts": "histc"}).canonical()
    return s


@st.composite
def _whole(draw: st.DrawFn, exchanged: bool) -> dict[str, Any]:
    names = tuple(CAPACITY) if exchanged else (*CAPACITY, *(n for n in loops.LOOPS if n in EASY_LOOPS))
    name = draw(st.sampled_from(names))
    products = draw(st.sampled_from((*experts.BATCHED, "loop_split"))) if name in CAPACITY else "loop_split"
    return {"whole": name, "products": products}


EASY_LOOPS = tuple(name for name in loops.LOOPS if why(Spelling(whole=name)) is None)


@st.composite
def _sorted(draw: st.DrawFn, exchanged: bool) -> dict[str, Any]:
    fields = {name: draw(_of(name)) for name in ("flatten", "sort", "counts", "products")}
    by_choice = fields["flatten"] in dispatch.CHOICE_ORDER
    fields["rows"] = draw(st.sampled_from(sorted(dispatch.ROWS_BY_CHOICE if by_choice else dispatch.ROWS)))
    if exchanged:
        fields.update({name: draw(_of(name)) for name in ("count_exchange", "splits", "weight_sent")})
        fields["regroup"] = draw(st.sampled_from((*exchange.REGROUP, *exchange.IDS_SENT)))
    if fields["counts"] in dispatch.FLOAT_COUNTS and (exchanged or fields["products"] not in experts.GROUPED):
        fields["counts"] = "histc_sorted"
    sent = bool(fields.get("weight_sent"))
    fields["weight_on"] = draw(
        st.sampled_from(("output", "input") if exchanged and not sent else ("output", "hidden", "input"))
    )
    early = sent or fields["weight_on"] != "output"
    fields["reduce"] = draw(st.sampled_from(("mul_sum", *combine.ACCUMULATE)) if early else _of("reduce"))
    if fields["reduce"] not in combine.ACCUMULATE:
        fields["unsort"] = draw(_of("unsort"))
    return fields


@st.composite
def faulty_spellings(draw: st.DrawFn, /, **kinds: Any) -> tuple[Spelling, Fault]:
    """A composed layer and a fault that has an effect on it; `kinds` as for `spellings`."""
    s = draw(spellings(**kinds))
    return s, FAULTS[draw(st.sampled_from([name for name, fault in FAULTS.items() if fault.fits(s)]))]
