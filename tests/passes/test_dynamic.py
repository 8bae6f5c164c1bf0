"""Token counts that change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from ..spellings.layer import build
from ..spellings.spelling import Spelling
from .models import Layer, inputs, seeded
from .support import FLAGS, assert_same, compiled, run

COUNTS = [5, 12, 3, 1, 0, 40]


def check(layer: Any, example: Callable[[int], tuple[Any, ...]]) -> None:
    """Equal for every count; compiled as often as without the pass: once, and once each for 0 and 1 tokens.

    A graph for one or no token is a graph of its own, since torch specialises those sizes. It need not match.
    """
    with compiled(layer, dynamic=True) as (function, record):
        for tokens in COUNTS:
            arguments = example(tokens)
            assert_same(run(function, layer, *arguments), run(layer, layer, *arguments))
    assert len(record.outcomes[0].matches) == 1, record.outcomes[0]
    assert record.outcomes[0].matches[0].tokens.startswith("s")
    assert record.compiles == plain_compiles(layer, example)
    assert record.compiles <= 3


def plain_compiles(layer: Any, example: Callable[[int], tuple[Any, ...]]) -> int:
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(**FLAGS):
        function = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
        for tokens in COUNTS:
            function(*example(tokens))
    return int(counter.frame_count)


def test_buckets() -> None:
    check(seeded(Layer), lambda tokens: (inputs(tokens),))


@pytest.mark.parametrize(
    "spelling",
    [
        Spelling(),
        Spelling(sort="sort", products="padded_bmm", shared="linear", outputs="y_counts"),
        Spelling(whole="where_ids", storage="out_in"),
        Spelling(flatten="t_reshape", rows="modulo", products="gathered", reduce="index_add_"),
    ],
    ids=lambda s: s.id,
)
def test_spellings(spelling: Spelling) -> None:
    layer = build(spelling)
    check(layer, layer.example)
