"""mokfx.explain says what happened, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import mokfx

from .models import Dense, MoE, tokens


def state(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "attributes": {name: dict(module.__dict__) for name, module in model.named_modules()},
        "rng": torch.get_rng_state(),
        "random": random.getstate(),
        "counters": {name: dict(counts) for name, counts in counters.items()},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a is b or a == b)


def test_a_model_in_training_is_as_before() -> None:
    model, x = Dense().train(), torch.randn(5, 8)
    before = state(model)
    mokfx.explain(model, x)
    assert same(state(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x)
    assert not same(state(model), before), "the comparison would have seen what a call changes"


def test_dynamo_s_caches_are_as_before() -> None:
    model, x = MoE(), tokens()
    code = MoE.forward.__code__
    mokfx.explain(model, x)
    assert _debug_get_cache_entry_list(code) == []
    compiled = torch.compile(model, backend="eager", dynamic=False)
    compiled(x)
    (_,) = _debug_get_cache_entry_list(code)
    counters.clear()
    for _ in range(10):  # more than Dynamo would recompile
        mokfx.explain(model, x)
    compiled(x)
    assert not counters["stats"], "the compiled code was still there"
    for number in (7, 8):
        compiled(tokens(number))
    assert counters["stats"]["unique_graphs"] == 4, "two graphs each: it could still recompile"


def test_what_dynamo_knows_of_varying_sizes_is_as_before() -> None:
    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        return 2 * x

    mokfx.explain(double, tokens(5))
    report = mokfx.explain(double, tokens(6))
    assert "f64[6, 8]" in report.graph_before, "a fixed size, as no other has been compiled yet"
    double(tokens(7))
    report = mokfx.explain(double, tokens(8))
    assert "f64[s" in report.graph_before, "a varying size, as one other has been compiled"


def test_a_module_is_explained_the_way_it_was_compiled() -> None:
    model, x = MoE(), tokens()
    assert len(mokfx.explain(model, x).graphs) == 2
    assert len(mokfx.explain(torch.compile(model, backend="mok"), x).graphs) == 2
    assert len(mokfx.explain(torch.compile(model, backend="mok", fullgraph=True), x).graphs) == 1
    assert len(mokfx.explain(mokfx.compile(model), x).graphs) == 1
    assert len(mokfx.explain(mokfx.compile(lambda x: model(x)), x).graphs) == 1


def test_a_module_compiled_in_place() -> None:
    model, x = MoE(), tokens()
    model.compile(backend="eager")
    assert len(mokfx.explain(model, x).graphs) == 2
    assert model._compiled_call_impl is not None


def test_keyword_arguments_hooks_and_grad_mode() -> None:
    model = Dense().eval()
    hooked: list[int] = []
    model.register_forward_hook(lambda *_: hooked.append(1))
    with torch.no_grad():
        report = mokfx.explain(model, x=torch.randn(5, 8))
    assert hooked == [1]
    assert "linear" in report.graph_before


def test_breaks_have_a_reason_and_a_place() -> None:
    report = mokfx.explain(MoE(), tokens())
    (graph_break,) = report.graph_breaks
    assert graph_break.where.startswith("models.py:")
    assert graph_break.code == "counts = F.one_hot(slots, EXPERTS).sum(0).tolist()"
    assert "value is dependent on the data of Tensor inputs" in graph_break.reason
    assert mokfx.explain(mokfx.compile(MoE()), tokens()).graph_breaks == ()


def test_the_model_s_error_comes_out_and_leaves_no_trace() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("from the model")

    counters.clear()
    try:
        mokfx.explain(fails, tokens())
    except KeyError as error:
        assert error.args == ("from the model",)
    else:
        raise AssertionError("no error")
    assert not counters
    assert _debug_get_cache_entry_list(fails.__code__) == []
