"""Every fact that the pass derives is true: what it says of a tensor is what the tensor holds."""

from __future__ import annotations

import pytest

from ..spellings.catalogue import all_spellings
from ..spellings.layer import build
from ..spellings.spelling import Sizes, Spelling
from .witness import assert_facts

SMALL = Sizes(tokens=4, hidden=2, intermediate=2, experts=4, top_k=2, shared=3)
ONE_RANK = [s for s in all_spellings() if not (s.exchange or s.needs_substitution or s.bf16_only)]
SOME = [s for s in ONE_RANK if s.router != "group_limited"][::5]  # which wants more experts


@pytest.mark.parametrize("spelling", SOME, ids=lambda s: s.id)
def test_facts_of_spellings(spelling: Spelling) -> None:
    layer = build(spelling, SMALL)
    assert assert_facts(layer, *layer.example()) > 10
