"""Sizes at their limits: experts with no token or with all; no token, one token, one choice, one expert."""

from __future__ import annotations

import pytest
import torch

from .models import Layer, inputs, seeded
from .support import assert_same, compiled, run

ROUTINGS = {
    "an expert without tokens": [[0, 1], [1, 0], [3, 0], [1, 3], [0, 1]],
    "all tokens on one expert": [[2], [2], [2], [2]],
    "one expert twice for a token": [[1, 1], [0, 3], [2, 2]],
    "one token": [[3, 1]],
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_routings(ids: list[list[int]]) -> None:
    chosen = torch.tensor(ids)
    layer = seeded(lambda: Layer(top_k=chosen.shape[1]))
    x = inputs(len(ids))
    with compiled(layer) as (function, record):
        got = run(function, layer, x, chosen)
    assert len(record.outcome.matches) == 1
    assert_same(got, run(layer, layer, x, chosen))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "matches"),
    [
        (0, 4, 2, 1),
        (1, 4, 2, 1),
        (6, 4, 1, 1),
        (6, 4, 4, 1),
        (1, 4, 1, 0),  # one row: nothing is sorted
        (6, 1, 1, 0),  # one expert: a dense network
    ],
)
def test_sizes(tokens: int, experts: int, top_k: int, matches: int) -> None:
    layer = seeded(lambda: Layer(experts=experts, top_k=top_k))
    x = inputs(tokens)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert len(record.outcome.matches) == matches, record.outcome.misses
    assert_same(got, run(layer, layer, x))
