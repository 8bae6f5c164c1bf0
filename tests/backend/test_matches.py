"""A user's view of a model whose MoE layers are recognised: explained, compiled, trained, pinned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mokfx

from .models import CumsumMoE, MoE, TwoMoE, tokens

GONE = ("argsort", "one_hot", ".item()", "split", "silu", "torch.cat")


def same_with_gradients(eager: nn.Module, compiled: nn.Module, x: Tensor) -> None:
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = eager(left), compiled(right)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    pairs = zip(compiled.parameters(), eager.parameters(), strict=True)
    for ours, theirs in [(right, left), *pairs]:
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager", "eager"])
def test_every_layer_becomes_a_call_and_trains(compiler: str) -> None:
    model = TwoMoE()
    compiled = torch.compile(copy.deepcopy(model), backend="mok", fullgraph=True, options={"mok.compiler": compiler})
    assert isinstance(compiled, nn.Module)
    same_with_gradients(model, compiled, tokens(9))
    assert (counters["mok"]["matched"], counters["mok"]["missed"]) == (2, 0)


def test_what_is_left_of_the_graph() -> None:
    report = mokfx.explain(mokfx.compile(TwoMoE()), tokens())
    assert len(report.matches) == 2
    assert report.misses == ()
    assert report.graph_after.count("torch.ops.mok.moe") == 2
    for name in GONE:
        assert name in report.graph_before
        assert name not in report.graph_after
    for match in report.matches:
        assert match.where.startswith("models.py:")
        assert (match.hidden, match.intermediate, match.num_experts, match.top_k) == ("8", "12", "4", "2")
        assert (match.group, match.ranks) == (None, 1)


def test_a_near_miss_is_left_alone_and_says_where() -> None:
    model = CumsumMoE()
    compiled = torch.compile(copy.deepcopy(model), backend="mok", fullgraph=True, options={"mok.compiler": "eager"})
    assert isinstance(compiled, nn.Module)
    same_with_gradients(model, compiled, tokens())
    (miss,) = mokfx.explain(compiled, tokens()).misses
    assert miss.where.startswith("models.py:")
    with pytest.raises(mokfx.MissError):
        mokfx.compile(model, options={"mok.on_miss": "raise"})(tokens())


def test_disabled() -> None:
    compiled = torch.compile(
        MoE(), backend="mok", fullgraph=True, options={"mok.enabled": False, "mok.compiler": "eager"}
    )
    compiled(tokens())
    assert not counters["mok"]


def test_few_recompilations_over_many_sizes() -> None:
    model = MoE()
    compiled = mokfx.compile(model, dynamic=True, options={"mok.compiler": "aot_eager"})
    for number in (6, 5, 9, 12, 2, 31):
        x = tokens(number)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-10)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["mok"]["matched"] == 1


@pytest.mark.parametrize("on_miss", ["ignore", "raise"])
def test_hit_loop_is_captured_by_mokfx_compile(on_miss: str) -> None:
    class HitLoop(MoE):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).softmax(-1).topk(2)
            mask = torch.nn.functional.one_hot(ids, 4).permute(2, 1, 0)
            out = torch.zeros_like(x)
            for e in (mask.sum((-1, -2)) > 0).nonzero():
                choice, token = torch.where(mask[e[0]])
                out.index_add_(0, token, self.experts[e[0]](x[token]) * weights[token, choice, None])
            return out

    model = HitLoop()
    compiled = mokfx.compile(model, options={"mok.compiler": "aot_eager", "mok.on_miss": on_miss})
    for x in (tokens(6), tokens(1).repeat(7, 1)):  # equal tokens hit two of the experts
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-10)
    assert (counters["mok"]["matched"], counters["mok"]["missed"]) == (2, 0)
