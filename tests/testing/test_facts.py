"""What `facts_of` says of a layer, for people."""

from __future__ import annotations

import torch

from mokfx.testing import facts_of

from ..check.models import layer, tokens


def test_each_value_has_an_equation_and_a_place() -> None:
    model = layer()
    facts = {fact.name: fact for fact in facts_of(model, tokens())}
    assert str(facts["rows"]) == "rows[i, j] = x[div(order[i], 2), j]"
    assert facts["rows"].meaning == "rows of x, in expert order"
    assert facts["rows"].where.startswith("demo_model.py:")
    assert facts["softmax"].meaning == ""
    assert not any("L_self" in fact.equation or "v1" in fact.equation for fact in facts.values())


def test_the_model_stays_as_it_was_and_dynamo_too() -> None:
    model = layer()
    facts_of(model, tokens())
    assert model.last is None and model.calls.item() == 0
    compiled = torch.compile(model.moe, backend="eager")
    assert torch.equal(compiled(tokens()), model.moe(tokens()))
