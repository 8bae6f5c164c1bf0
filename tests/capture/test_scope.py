"""Nothing outlives a scope, and nothing outside one is touched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mokfx.capture import Capture, proving, substitutions
from tests.capture.harness import Compiled, absorb, drop_markers, nothing
from tests.capture.models import E, EveryExpertOrSkip, HitModules, SortedCounts, tokens_for

PATCHED = [(ShapeEnv, "evaluate_sym_node"), (SymNodeVariable, "create"), (TensorVariable, "richcompare_impl")]


def state() -> list[Any]:
    return [vars(owner)[name] for owner, name in PATCHED]


def test_nothing_global_remains_changed() -> None:
    before, config = state(), torch._dynamo.config.get_config_copy()
    with substitutions():
        inside = state()
        with substitutions():
            assert state() == inside
        assert state() == inside
    assert state() == before
    assert all(new is not old for new, old in zip(inside, before, strict=True))
    layer = HitModules()
    Compiled(layer)(tokens_for(layer, experts=E))
    assert state() == before
    assert torch._dynamo.config.get_config_copy() == config


def test_an_error_inside_restores_too() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), substitutions():
        raise ZeroDivisionError
    assert state() == before


def test_another_thread_is_untouched() -> None:
    layer = HitModules()
    x = tokens_for(layer, experts=E)
    caught: list[Exception] = []

    def compile_plainly() -> None:
        try:
            torch.compile(layer, backend="eager", fullgraph=True)(x)
        except Exception as error:
            caught.append(error)

    with substitutions() as session:
        thread = threading.Thread(target=compile_plainly)
        thread.start()
        thread.join()
    assert len(caught) == 1 and "data-dependent" in str(caught[0])
    assert session.misses == []


def test_a_plain_compile_of_the_same_function_has_its_own_graphs() -> None:
    layer = HitModules()
    full, part = tokens_for(layer, experts=E), tokens_for(layer, experts=2)
    captured = Compiled(layer)
    captured(full)
    graphs: list[torch.fx.GraphModule] = []

    def record(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    plain = torch.compile(layer, backend=record)
    for x in (full, part):
        torch.testing.assert_close(plain(x), layer(x))
    assert graphs
    assert not any("mok" in str(node.target) for gm in graphs for node in gm.graph.nodes)
    with pytest.raises(RuntimeError):  # the captured graph still serves its own function only, and asserts
        captured(part)


def test_a_graph_compiled_outside_serves_inside_and_is_right() -> None:
    layer = EveryExpertOrSkip()
    compiled = Compiled(layer, nothing, fullgraph=False)
    part = tokens_for(layer, experts=2)
    torch.testing.assert_close(compiled.compiled(part), layer(part))
    torch.testing.assert_close(compiled(part), layer(part))
    assert compiled.markers == []


def test_the_retry_traces_the_frame_again_before_it_runs() -> None:
    layer = SortedCounts()
    compiled = Compiled(layer, nothing, fullgraph=False)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    compiled(tokens_for(layer, experts=2))
    assert calls == [1]


def test_a_line_given_up_stays_given_up() -> None:
    layer = EveryExpertOrSkip()
    compiled = Compiled(layer, nothing, fullgraph=False, dynamic=False)
    compiled(tokens_for(layer, experts=E, count=12))
    reasons, tries = compiled.reasons, compiled.tries
    compiled(tokens_for(layer, experts=E, count=16))
    assert compiled.reasons == reasons
    assert compiled.tries <= 2 * tries


def test_one_layer_may_be_proven_and_another_not() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = EveryExpertOrSkip(), SortedCounts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    def absorb_one(gm: torch.fx.GraphModule) -> None:
        lines = {node.args[-1] for node in gm.graph.nodes if "assume" in str(node.target)}
        if len(lines) == 1:
            absorb(gm)

    model = Two()
    model.second.router = model.first.router
    x = tokens_for(model.first, experts=E)
    compiled = Compiled(model, absorb_one, fullgraph=False)
    torch.testing.assert_close(model(x).shape, compiled(x).shape)
    assert len(compiled.reasons) == 2


def test_proving_does_nothing_outside_a_scope() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with proving(gm):
        drop_markers(gm)
    assert gm(torch.zeros(())) == 1


def test_a_scope_gives_its_session() -> None:
    session = Capture()
    with substitutions(session) as given:
        assert given is session
    with substitutions() as fresh:
        assert fresh.misses == []
