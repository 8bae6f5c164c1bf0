"""Every one-rank spelling under activation checkpointing, and under bf16 autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..spellings.layer import build
from ..spellings.spelling import Spelling
from .support import Run, assert_same, compiled, run
from .test_spellings_one_rank import ONE_RANK

IN_FP32 = [s for s in ONE_RANK if not s.bf16_only and s.whole != "mask_slots"]
"""`mask_slots` writes bf16 into an fp32 buffer under autocast, which eager refuses too."""

ROUNDING = 2.0**-8
"""Half a unit in the last place of bf16, relative."""


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, token_ids: Tensor) -> Any:
        return checkpoint(self.layer, x, token_ids, use_reentrant=False)


@pytest.mark.parametrize("spelling", ONE_RANK, ids=lambda s: s.id)
def test_checkpointed(spelling: Spelling) -> None:
    """The op runs again in the backward and gives the same bits as without a checkpoint."""
    layer = build(spelling, dtype=torch.bfloat16 if spelling.bf16_only else torch.float64)
    x, token_ids = layer.example()
    with compiled(Checkpointed(layer)) as (function, record):
        got = run(function, layer, x, token_ids)
    assert len(record.calls) == 1
    with compiled(layer) as (function, _):
        assert_same(got, run(function, layer, x, token_ids), tolerance=0.0)


@pytest.mark.parametrize("spelling", IN_FP32, ids=lambda s: s.id)
def test_autocast(spelling: Spelling) -> None:
    """fp32 weights compute in bf16: eager's dtypes, and a few roundings from eager, or what eager is from fp32."""
    layer = build(spelling, dtype=torch.float32)
    x, token_ids = layer.example()
    with torch.autocast("cpu", dtype=torch.bfloat16), compiled(layer) as (function, record):
        got = run(function, layer, x, token_ids)
    assert len(record.calls) == 1, record.outcome.misses
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = run(layer, layer, x, token_ids)
    _assert_close(got, eager, run(layer, layer, x, token_ids))


def _assert_close(got: Run, eager: Run, exact: Run) -> None:
    for (name, a), (_, b), (_, best) in zip(got.named(), eager.named(), exact.named(), strict=True):
        assert (a is None) == (b is None), name
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype, name
            if b.is_floating_point():
                error = _distance(a, b)
                assert error < max(6 * ROUNDING, 2 * _distance(b, best)), f"{name}: {error:.1e}"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
