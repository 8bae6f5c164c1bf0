"""Each line becomes one graph, with the markers and ops that the pass is told to expect."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mokfx.capture.chosen import counted_of
from mokfx.capture.hits import hit_list
from mokfx.capture.markers import MARKERS
from tests.capture.harness import Compiled, absorb, nothing
from tests.capture.models import (
    BRANCHES,
    LOOPS,
    DummyRow,
    E,
    Layer,
    SortedCounts,
    SplitCounts,
    tokens_for,
)


@pytest.mark.parametrize(
    "model", [*LOOPS, *BRANCHES, SplitCounts, DummyRow], ids=lambda m: m.__name__
)
def test_one_graph_that_equals_eager_where_its_assumptions_hold(model: type[Layer]) -> None:
    layer = model()
    compiled = Compiled(layer)
    x = tokens_for(layer, experts=E)
    torch.testing.assert_close(compiled(x), layer(x))
    assert len(compiled.graphs) == 1
    assert compiled.reasons == []


@pytest.mark.parametrize("model", LOOPS, ids=lambda m: m.__name__)
def test_a_loop_over_hit_experts_leaves_one_marker(model: type[Layer]) -> None:
    layer = model()
    compiled = Compiled(layer)
    compiled(tokens_for(layer, experts=E))
    (marker,) = compiled.nodes(torch.ops.mok.assume_every_expert.default)
    hit, rows, num_experts, _ = marker.args
    assert num_experts == E
    assert hit.meta["example_value"].shape[0] in (E, E + 1)  # some masks have room for one more than there are
    assert rows.meta["example_value"].dtype == torch.int64


@pytest.mark.parametrize("model", LOOPS, ids=lambda m: m.__name__)
def test_the_pass_sees_numbers_and_neither_marker_nor_list(model: type[Layer]) -> None:
    layer, seen = model(), []

    def look(gm: torch.fx.GraphModule) -> None:
        seen.append([n.name for n in gm.graph.nodes if n.target in MARKERS or "assume_every" in str(n.users)])
        hits = [n for n in gm.graph.nodes if hit_list(n) and counted_of(hit_list(n)) is not None]
        seen.append([n.name for n in hits])
        absorb(gm)

    compiled = Compiled(layer, look)
    compiled(tokens_for(layer, experts=E))
    assert seen == [[], []]
    assert compiled.reasons == []


@pytest.mark.parametrize("model", BRANCHES, ids=lambda m: m.__name__)
def test_a_test_for_rows_leaves_a_marker_for_each_expert(model: type[Layer]) -> None:
    layer = model()
    compiled = Compiled(layer)
    compiled(tokens_for(layer, experts=E))
    assert Counter(m.split()[0] for m in compiled.markers) == {"mok::assume_nonempty": E}
    sizes = [n.args[0].meta["example_value"] for n in compiled.nodes(torch.ops.mok.assume_nonempty.default)]
    assert len({str(size) for size in sizes}) == E


@pytest.mark.parametrize("model", [*LOOPS, *BRANCHES], ids=lambda m: m.__name__)
def test_the_graph_raises_where_its_assumptions_fail(model: type[Layer]) -> None:
    layer = model()
    compiled = Compiled(layer)
    compiled(tokens_for(layer, experts=E))
    with pytest.raises(RuntimeError, match=r"this graph was captured for|Runtime assertion failed"):
        compiled(tokens_for(layer, experts=E - 1))
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("model", [*LOOPS, *BRANCHES, DummyRow], ids=lambda m: m.__name__)
def test_absorbed_layers_are_proven_at_the_first_try(model: type[Layer]) -> None:
    layer = model()
    compiled = Compiled(layer, absorb)
    compiled(tokens_for(layer, experts=E))
    assert (compiled.tries, len(compiled.graphs), compiled.reasons) == (1, 1, [])


@pytest.mark.parametrize("model", [*LOOPS, *BRANCHES, DummyRow], ids=lambda m: m.__name__)
@pytest.mark.parametrize("experts", [E, 2])
def test_unproven_layers_fall_back_to_plain_dynamo_and_stay_right(model: type[Layer], experts: int) -> None:
    layer = model()
    compiled = Compiled(layer, nothing, fullgraph=False)
    x = tokens_for(layer, experts=experts)
    torch.testing.assert_close(compiled(x), layer(x))
    assert compiled.markers == []
    assert compiled.reasons and all("was not captured: " in reason for reason in compiled.reasons)


def test_gradients_of_the_captured_graph() -> None:
    layer = SortedCounts()
    x = tokens_for(layer, experts=E).requires_grad_()
    layer(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    expected["x"] = x.grad.clone()
    layer.zero_grad()
    x.grad = None
    Compiled(layer)(x).square().sum().backward()
    actual = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None} | {"x": x.grad}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


def test_sizes_may_be_dynamic() -> None:
    layer = SortedCounts()
    compiled = Compiled(layer, dynamic=True)
    for count in (12, 16, 20):
        x = tokens_for(layer, experts=E, count=count)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(compiled.graphs) == 1
