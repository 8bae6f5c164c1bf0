"""`mokfx.compile` of layers that plain Dynamo stops at: one op call, and eager's numbers whichever experts
are hit."""

from __future__ import annotations

import pytest
import torch

import mokfx
from tests.capture.harness import Compiled
from tests.capture.models import BRANCHES, LOOPS, DummyRow, E, HitTensorRows, Layer, SplitCounts, tokens_for

MODELS = [*LOOPS, *BRANCHES, SplitCounts, DummyRow]


def gradients(model: torch.nn.Module, function, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradient of each input and parameter, of 0 where eager leaves none."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = function(x)
    y.square().sum().backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | found


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_one_layer_is_rewritten_and_equals_eager(model: type[Layer]) -> None:
    layer = model().double()
    compiled = mokfx.compile(layer, options={"mok.on_miss": "raise"})
    for experts in (E, 3, 2):
        x = tokens_for(layer, experts=experts).double()
        expected, actual = gradients(layer, layer, x), gradients(layer, compiled, x)
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    report = mokfx.explain(compiled, x)
    assert (len(report.matches), report.misses) == (1, ())


def test_two_layers_of_one_class() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(HitTensorRows() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Model().double()
    compiled = mokfx.compile(model, options={"mok.on_miss": "raise"})
    x = tokens_for(model.layers[0], experts=2).double()
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-10)
    assert len(mokfx.explain(compiled, x).matches) == 2


def test_a_layer_that_is_not_understood_stays_eager_with_the_reason() -> None:
    class Doubled(HitTensorRows):
        def layer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            mask = torch.nn.functional.one_hot(ids, E).permute(2, 1, 0)
            for e in (mask.sum(dim=(1, 2)) > 0).nonzero():
                choice, token = torch.where(mask[e[0]])
                out.index_add_(0, token, torch.cumsum(x[token], 0) * weights[token, choice, None])
            return out

    layer = Doubled()
    compiled = mokfx.compile(layer)
    for experts in (E, 2):
        x = tokens_for(layer, experts=experts)
        torch.testing.assert_close(compiled(x), layer(x))
    report = mokfx.explain(compiled, x)
    assert report.matches == ()
    assert any(
        "the loop over `(mask.sum(dim=(1, 2)) > 0).nonzero()` was not captured" in m.reason
        for m in report.misses
    )


def test_the_pass_sees_no_marker() -> None:
    layer, seen = HitTensorRows(), []
    compiled = Compiled(layer, lambda gm: seen.extend(str(n.target) for n in gm.graph.nodes), fullgraph=False)
    compiled(tokens_for(layer, experts=E))
    assert seen and not any("assume_" in target for target in seen)
