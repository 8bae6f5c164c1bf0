"""Layers with capacity become one call that drops the same slots; what only looks like one does not match."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ranks import run_ranks
from ..spellings.capacity import CAPACITY, ORDER
from ..spellings.layer import build
from ..spellings.spelling import Sizes, Spelling
from .support import assert_same, compiled, run

PRODUCTS = ["padded_bmm", "padded_matmul", "padded_einsum", "loop_split"]
EXCHANGES = ["plain", "functional", "functional_autograd", "function_recursive", "function_mirror"]


def spelled(whole: str, products: str = "padded_bmm", **rest: Any) -> Spelling:
    router = "switch_max" if whole == "einsum_switch" else "softmax_topk"
    return Spelling(whole=whole, products=products, router=router, **rest)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("whole", CAPACITY)
def test_one_call(whole: str, products: str) -> None:
    layer = build(spelled(whole, products))
    x, token_ids = layer.example()
    with compiled(layer) as (function, record):
        got = run(function, layer, x, token_ids)
    assert len(record.outcome.matches) == len(record.calls) == 1, record.outcome.misses
    settings = record.calls[0].kwargs
    assert settings["capacity"] == math.ceil(16 * layer.top_k * 0.75 / 8)
    assert settings.get("capacity_order", "choice") == ORDER[whole]
    assert_same(got, run(layer, layer, x, token_ids))


@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 23, 40])
@pytest.mark.parametrize("whole", CAPACITY)
def test_sizes(whole: str, tokens: int) -> None:
    """Also queues one place long. Of a single token torch makes a graph of its own, which need not match."""
    layer = build(spelled(whole), Sizes(tokens=tokens))
    x, token_ids = layer.example()
    with compiled(layer) as (function, record):
        got = run(function, layer, x, token_ids)
    assert len(record.outcome.matches) == (1 if tokens != 1 else len(record.calls)), record.outcome.misses
    assert_same(got, run(layer, layer, x, token_ids))


@pytest.mark.parametrize("whole", ["einsum_gshard", "einsum_queue", "einsum_queue_choice"])
def test_capacity_follows_the_tokens(whole: str) -> None:
    """The capacity is a number that the graph computes. (Where `one_hot` is C wide, torch fixes C.)"""
    layer = build(spelled(whole))
    with compiled(layer, dynamic=True) as (function, record):
        for tokens in (40, 17, 23):
            inputs = layer.example(tokens)
            assert_same(run(function, layer, *inputs), run(layer, layer, *inputs))
    assert all(len(outcome.matches) == 1 for outcome in record.outcomes), record.outcomes
    assert isinstance(record.calls[0].kwargs["capacity"], torch.fx.Node)


def _on_ranks(rank: int, size: int) -> list[tuple[str, int]]:
    """Compare each spelling with eager on this rank; what it matched."""
    found = []
    group = torch.distributed.group.WORLD
    spellings = [spelled(whole, exchange="functional_autograd") for whole in CAPACITY]
    spellings += [replace(spellings[1], exchange=exchange) for exchange in EXCHANGES]
    spellings += [replace(spellings[1], products=products) for products in PRODUCTS]
    for spelling in spellings:
        layer = build(spelling, group=group)
        x, token_ids = layer.example(seed=rank)
        with compiled(layer) as (function, record):
            got = run(function, layer, x, token_ids)
        reference = build(replace(spelling, exchange="functional_autograd"), group=group)
        assert_same(got, run(reference, reference, x, token_ids))
        left = {str(node.target) for node in record.modules[-1].graph.nodes}
        assert not any("all_to_all" in name or "wait" in name for name in left), spelling.id
        found.append((spelling.id, len(record.calls)))
    return found


def test_two_ranks() -> None:
    """Equal splits: each rank's capacity is its own, experts are on the rank of their block."""
    for found in run_ranks(2, _on_ranks, 2, timeout=300):
        assert found and all(calls == 1 for _, calls in found), found


# -- what only looks like it ------------------------------------------------------------------------------

EXPERTS, HIDDEN, CAP = 4, 8, 5

Masks = tuple[Tensor, Tensor]
"""Dispatch and combine, [T, E, C]."""


class Bent(nn.Module):
    """Top-2 with masks, two experts' worth of layer, and one thing changed."""

    def __init__(self, masks: Callable[[Tensor, Tensor], Masks], roll: int = 0) -> None:
        super().__init__()
        self.masks, self.roll = masks, roll
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 6, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(x @ self.router, dim=-1), 2, dim=-1)
        dispatch, combine = self.masks(ids, weights)
        buckets = torch.einsum("tec,th->ech", dispatch, x)
        out = torch.bmm(torch.relu(torch.bmm(buckets, self.up)), self.down)
        return torch.einsum("tec,ech->th", combine, out.roll(self.roll, 0) if self.roll else out)


def places(ids: Tensor, by_choice: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """For each choice its mask [T, E] and its place [T]."""
    flat = ids.t().reshape(-1) if by_choice else ids.reshape(-1)
    mask = F.one_hot(flat, EXPERTS)
    place = ((mask.cumsum(0) - 1) * mask).sum(-1)
    if by_choice:
        return list(mask.view(2, -1, EXPERTS).unbind(0)), list(place.view(2, -1).unbind(0))
    return list(mask.view(-1, 2, EXPERTS).unbind(1)), list(place.view(-1, 2).unbind(1))


def slots(masks: list[Tensor], where: list[Tensor], cap: int = CAP) -> list[Tensor]:
    """For each choice its slots [T, E, C]."""
    at = [w.unsqueeze(-1) == torch.arange(cap) for w in where]
    return [(m.unsqueeze(-1) * a.unsqueeze(1)).double() for m, a in zip(masks, at, strict=True)]


def weighted(parts: list[Tensor], weights: Tensor) -> Tensor:
    return parts[0] * weights[:, 0, None, None] + parts[1] * weights[:, 1, None, None]


def right(ids: Tensor, weights: Tensor) -> Masks:
    parts = slots(*places(ids))
    return parts[0] + parts[1], weighted(parts, weights)


def off_by_one(ids: Tensor, weights: Tensor) -> Masks:
    masks, where = places(ids)
    parts = slots(masks, [w - 1 for w in where])
    return parts[0] + parts[1], weighted(parts, weights)


def one_place_later(ids: Tensor, weights: Tensor) -> Masks:
    masks, where = places(ids)
    parts = slots(masks, [w + 1 for w in where])
    return parts[0] + parts[1], weighted(parts, weights)


def combined_one_later(ids: Tensor, weights: Tensor) -> Masks:
    masks, where = places(ids)
    dispatch, combine = slots(masks, where), slots(masks, [w + 1 for w in where])
    return dispatch[0] + dispatch[1], weighted(combine, weights)


def other_order(ids: Tensor, weights: Tensor) -> Masks:
    dispatch, combine = slots(*places(ids)), slots(*places(ids, by_choice=False))
    return dispatch[0] + dispatch[1], weighted(combine, weights)


def counted_apart(ids: Tensor, weights: Tensor) -> Masks:
    """Second choices do not queue behind the first: both start at place 0, and rows add up."""
    masks = [F.one_hot(ids[:, j], EXPERTS) for j in range(2)]
    parts = slots(masks, [((m.cumsum(0) - 1) * m).sum(-1) for m in masks])
    return parts[0] + parts[1], weighted(parts, weights)


def behind_themselves(ids: Tensor, weights: Tensor) -> Masks:
    """Second choices start behind as many places as there are second choices."""
    masks = [F.one_hot(ids[:, j], EXPERTS) for j in range(2)]
    first, second = (m.cumsum(0) - 1 for m in masks)
    second = second + masks[1].sum(0, keepdim=True)
    parts = slots(masks, [(p * m).sum(-1) for p, m in zip((first, second), masks, strict=True)])
    return parts[0] + parts[1], weighted(parts, weights)


def swapped_weights(ids: Tensor, weights: Tensor) -> Masks:
    parts = slots(*places(ids))
    return parts[0] + parts[1], weighted(parts, weights.flip(-1))


def cut_by_first(ids: Tensor, weights: Tensor) -> Masks:
    """Both choices are dropped where the first one finds no place."""
    masks, where = places(ids)
    parts = slots(masks, where)
    kept = (where[0] < CAP - 2).double()[:, None, None]
    return parts[0] + parts[1], weighted([p * kept for p in parts], weights)


def two_capacities(ids: Tensor, weights: Tensor) -> Masks:
    """Combine takes fewer places than dispatch: the smaller capacity is the layer's."""
    masks, where = places(ids)
    parts = slots(masks, where)
    kept = [p * (w < CAP - 2).double()[:, None, None] for p, w in zip(parts, where, strict=True)]
    return parts[0] + parts[1], weighted(kept, weights)


def wrong_experts(ids: Tensor, weights: Tensor) -> Masks:
    """Rows go to the expert of the other choice, and their weights with them."""
    parts = slots(*places(ids.flip(-1)))
    return parts[0] + parts[1], weighted(parts, weights)


def present_gate(ids: Tensor, weights: Tensor) -> Masks:
    """Rows are there where another number than the router weight is not 0."""
    masks, where = places(ids)
    parts = slots(masks, where)
    gate = torch.relu(weights - 0.3)
    return (weighted(parts, gate) != 0).double(), weighted(parts, weights)


def reversed_tokens(ids: Tensor, weights: Tensor) -> Masks:
    """Later tokens come first."""
    masks, where = places(ids.flip(0))
    parts = [p.flip(0) for p in slots(masks, where)]
    return parts[0] + parts[1], weighted(parts, weights)


def present_cancelled(ids: Tensor, weights: Tensor) -> Masks:
    """The presence of a sum whose terms meet in one place."""
    masks = [F.one_hot(ids[:, j], EXPERTS) for j in range(2)]
    parts = slots(masks, [((m.cumsum(0) - 1) * m).sum(-1) for m in masks])
    combine = weighted(parts, weights)
    return (combine.sum(0, keepdim=True) != 0).double() * combine, combine


BENT = [
    off_by_one, one_place_later, combined_one_later, other_order, counted_apart, behind_themselves,
    swapped_weights, cut_by_first, two_capacities, wrong_experts, present_gate, reversed_tokens,
    present_cancelled,
]  # fmt: skip


@pytest.mark.parametrize("tokens", [13, 16])
@pytest.mark.parametrize("masks", BENT, ids=lambda f: f.__name__)
def test_bent(masks: Callable[[Tensor, Tensor], Masks], tokens: int) -> None:
    """Whatever the pass makes of it, the numbers are the program's."""
    _compare(masks, tokens)


MATCHING = {"two_capacities", "wrong_experts", "swapped_weights", "present_gate"}
"""Layers after all, of other operands or with a smaller capacity; they may match."""


@pytest.mark.parametrize("masks", [m for m in BENT if m.__name__ not in MATCHING], ids=lambda f: f.__name__)
def test_no_layer(masks: Callable[[Tensor, Tensor], Masks]) -> None:
    """No call computes these, so none is there."""
    assert _compare(masks, 16) == 0


def test_the_straight_one_matches() -> None:
    assert _compare(right, 13) == _compare(right, 16) == 1


def test_rolled_experts() -> None:
    """Every row is read back from another expert's bucket."""
    assert _compare(right, 16, roll=1) == 0


def _compare(masks: Callable[[Tensor, Tensor], Masks], tokens: int, roll: int = 0) -> int:
    torch.manual_seed(tokens)
    layer = Bent(masks, roll)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert_same(got, run(layer, layer, x))
    return len(record.calls)
