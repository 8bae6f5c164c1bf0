"""Every simplification is an identity: a random term and its simplified form have one worth everywhere."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mokfx.passes.terms import Term, bound

from .draw import Terms, World, worlds
from .evaluate import Evaluator, Unspecified, simplified

MANY = settings(
    derandomize=True, deadline=None, database=None, max_examples=400, suppress_health_check=list(HealthCheck)
)


def assert_same_everywhere(raw: Term, term: Term) -> None:
    """At all positions; where the raw term is unspecified, the simplified one may be anything."""
    evaluate = Evaluator()
    for env in evaluate.range(sorted(raw.free | term.free)):
        try:
            wanted = evaluate(raw, env)
        except Unspecified:
            continue
        got = evaluate(term, env)
        same = math.isclose(got, wanted, rel_tol=1e-12, abs_tol=1e-12)
        assert same, f"{raw} is {wanted}, {term} is {got} at {env}"


@MANY
@given(worlds(least=1), st.data())
def test_positions(world: World, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([world.slots, world.tokens, world.experts, world.top_k, 6]))
    raw = Terms(data.draw, world, []).position(size, 4)
    term = simplified(raw)
    assert_same_everywhere(raw, term)
    limit = bound(term)
    if limit is not None:
        evaluate = Evaluator()
        assert all(0 <= evaluate(term, env) < limit for env in evaluate.range(sorted(term.free)))


@MANY
@given(worlds(least=1), st.data())
def test_whole_numbers(world: World, data: st.DataObject) -> None:
    raw = Terms(data.draw, world, []).whole(4)
    assert_same_everywhere(raw, simplified(raw))


@settings(MANY, max_examples=200)
@given(worlds(least=1), st.data())
def test_sums_and_products(world: World, data: st.DataObject) -> None:
    raw = Terms(data.draw, world, []).real(4)
    assert_same_everywhere(raw, simplified(raw))
