"""Every one-rank spelling becomes exactly one call, and computes what it computed, with every gradient."""

from __future__ import annotations

import pytest
import torch

from ..spellings.catalogue import all_spellings
from ..spellings.layer import build
from ..spellings.oracle import exact
from ..spellings.spelling import Spelling
from .support import Run, assert_no_farther, assert_same, compiled, loss_of, run

ONE_RANK = [s for s in all_spellings() if not s.exchange and not s.needs_substitution]
GONE = {
    "sort", "argsort", "bmm", "_grouped_mm", "grouped_mm", "histc", "bincount", "item", "tolist", "where",
    "nonzero", "index_add", "index_add_", "repeat_interleave", "index_copy_", "silu", "gelu", "relu", "relu_",
}  # fmt: skip
"""What only a layer's dispatch, experts and combine call in these models, and no router or output does."""


@pytest.mark.parametrize("spelling", ONE_RANK, ids=lambda s: s.id)
def test_one_call(spelling: Spelling) -> None:
    layer = build(spelling, dtype=torch.bfloat16 if spelling.bf16_only else torch.float64)
    x, token_ids = layer.example()
    with compiled(layer) as (function, record):
        got = run(function, layer, x, token_ids)
    assert len(record.outcome.matches) == 1, record.outcome.misses
    assert len(record.calls) == 1
    assert not record.names() & GONE
    assert record.outcome.matches[0].node == record.calls[0].name
    eager = run(layer, layer, x, token_ids)
    if spelling.bf16_only:
        y, routed = exact([layer], 0, x, token_ids)
        extras = {"y_logits": routed.logits, "y_aux": routed.aux, "y_ids": routed.ids}
        outputs = (y, extras[spelling.outputs]) if spelling.outputs in extras else (y,)
        leaves = {"x": x, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad(loss_of(outputs), list(leaves.values()), allow_unused=True)
        assert_no_farther(got, eager, Run(outputs, dict(zip(leaves, gradients, strict=True))))
    else:
        assert_same(got, eager)
