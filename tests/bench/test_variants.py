"""Every variant that is a whole layer computes it, alone and on two ranks, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mokfx.bench.layer import make
from mokfx.bench.ranks import Ranks, ranks
from mokfx.bench.run import Protocol, bench
from mokfx.bench.truth import truth
from mokfx.bench.variants import VARIANTS

from ..ranks import run_ranks
from .layers import ALONE, SHAPES, small
from .test_report import CEILINGS

WHOLE = ("eager", "inductor", "mok")


def measured(here: Ranks, kind: str, backward: bool, variants: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The errors of each variant on a small layer, which must have been timed."""
    found = {}
    for result in bench([SHAPES[kind]], variants, here, Protocol(backward, calls=1, groups=2), CEILINGS):
        assert result.timing is not None, (result.variant, result.reason)
        assert 0 < result.timing.fastest <= result.timing.median <= result.timing.slowest
        found[result.variant] = dict(result.errors)
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_variants_agree_with_the_truth(kind: str) -> None:
    found = measured(ALONE, kind, True, WHOLE)
    names = {"y", "a row of y", "a row of d_x", *("d_" + name for name in small(kind).inputs())}
    for variant in WHOLE:
        assert set(found[variant]) == names, variant
    assert measured(ALONE, kind, False, ("eager",))["eager"].keys() == {"y", "a row of y"}


def test_parts_have_no_answer_to_check() -> None:
    for backward in (False, True):
        assert measured(ALONE, "plain", backward, ("grouped_mm", "cublas")) == {"grouped_mm": {}, "cublas": {}}


def on_two_ranks(rank: int) -> dict[str, dict[str, float]]:
    here = ranks("cpu")
    assert here.size == 2 and here.rank == rank and dist.get_world_size() == 2
    found = measured(here, "plain", True, (*WHOLE, "grouped_mm"))
    return {"gpt-oss": measured(here, "gpt-oss", True, ("eager",))["eager"]} | found


def test_variants_agree_on_two_ranks() -> None:
    for errors in run_ranks(2, on_two_ranks, timeout=400):  # each compiles with a cold cache
        assert errors.pop("grouped_mm") == {}
        assert set(errors) == {*WHOLE, "gpt-oss"}
        for each in errors.values():
            assert 0 < max(each.values()) < 3e-2


def test_the_ops_line_names_the_provider() -> None:
    assert VARIANTS["mok"](small(), False).note == "provider reference"


def test_each_seed_and_each_rank_draws_its_own() -> None:
    first, same, other = (make(SHAPES["plain"], ALONE, seed) for seed in (0, 0, 1))
    beside = make(SHAPES["plain"], Ranks(ALONE.device, rank=1, size=2), 0)
    assert torch.equal(first.x, same.x) and torch.equal(first.down, same.down)
    assert not torch.equal(first.x, other.x) and not torch.equal(first.x, beside.x)
    assert beside.down.shape[0] == first.down.shape[0] // 2
    assert truth(first, False).experts[0] == 0
