"""Random spellings are valid, and equal the oracle as those of the catalogue do."""

from __future__ import annotations

import torch.distributed as dist
from hypothesis import given, settings

from ..ranks import run_ranks
from .catalogue import CHOICES
from .layer import build
from .spelling import Sizes, Spelling
from .strategies import FIXED, sample, spellings
from .test_spellings import check, check_exchanges, dtype_of


@settings(FIXED, max_examples=300)
@given(spellings())
def test_random_spellings_are_valid(spelling: Spelling) -> None:
    assert spelling.problem() is None
    assert not spelling.needs_substitution
    stages = {f: values for f, values in CHOICES.items() if f not in ("whole", "exchange")}
    assert all(getattr(spelling, f) in values for f, values in stages.items())


@settings(FIXED, max_examples=200)
@given(spellings(exchanged=False))
def test_random_layers_equal_oracle(spelling: Spelling) -> None:
    layer = build(spelling, Sizes(tokens=12), dtype=dtype_of(spelling))
    check([layer], 0, [layer.example()], layer, grads=True)


def test_random_exchanges_equal_oracle() -> None:
    drawn = [s for s in sample(spellings(exchanged=True), 60) if not s.cut_in_eager]
    assert len(drawn) > 30
    assert run_ranks(2, check_exchanges, drawn, [16, 10]) == [len(drawn)] * 2


def test_samples_are_the_same_again() -> None:
    first, second = (sample(spellings(), 20) for _ in range(2))
    assert first == second
    assert len(set(first)) > 15
    assert not dist.is_initialized()
