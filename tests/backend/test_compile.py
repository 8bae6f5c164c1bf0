"""mokfx.compile: sizes that depend on data are captured, and nothing global changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters

import mokfx

from .models import MoE, tokens

EAGER = {"mok.compiler": "aot_eager"}
FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def flags() -> list[bool]:
    return [getattr(config, flag) for flag in FLAGS]


def test_one_graph_where_torch_compile_has_two() -> None:
    model, x = MoE(), tokens()
    torch.compile(model, backend="mok", options=EAGER)(x)
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
    counters.clear()
    y = mokfx.compile(model, options=EAGER)(x)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.testing.assert_close(y, model(x), rtol=0, atol=1e-12)
    assert flags() == [False, False]


def test_recompiles_later_and_in_between_other_models() -> None:
    model = MoE()
    compiled = mokfx.compile(model, options=EAGER, dynamic=False)
    for number in (6, 5, 9):
        x = tokens(number).requires_grad_()
        compiled(x).sum().backward()
        assert flags() == [False, False]
        torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(x)
    assert counters["stats"]["unique_graphs"] == 3 + 3
    assert not counters["graph_break"]


def test_config_is_restored_after_an_error() -> None:
    @mokfx.compile(options=EAGER)
    def fails(x: Tensor) -> Tensor:
        raise ValueError("from the model")

    with pytest.raises(ValueError, match="from the model"):
        fails(tokens())
    assert flags() == [False, False]


def test_what_else_cannot_be_captured_breaks_the_graph() -> None:
    @mokfx.compile(options=EAGER)
    def breaks(x: Tensor) -> Tensor:
        y = x + x.sum().item()
        torch._dynamo.graph_break()
        return y * x.max().item()

    x = tokens()
    assert torch.equal(breaks(x), (x + x.sum().item()) * x.max().item())
    assert counters["stats"]["unique_graphs"] == 2


def test_under_checkpoint_the_recomputation_does_not_break_either() -> None:
    compiled = mokfx.compile(MoE(), options=EAGER)
    x = tokens().requires_grad_()
    torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert not counters["graph_break"]
    assert x.grad is not None


def test_inside_another_compiled_function() -> None:
    inner = mokfx.compile(MoE(), options=EAGER)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    x = tokens()
    torch.testing.assert_close(outer(x), inner._orig_mod(x) + 1, rtol=0, atol=1e-12)


class Counting(MoE):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def describe(self) -> str:
        return "a model"


def test_feels_like_torch_compile_s_module() -> None:
    model = Counting()
    compiled: Any = mokfx.compile(model)
    assert type(compiled) is type(torch.compile(model))
    assert compiled.describe() == "a model"
    assert compiled.router is model.router
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()]
    compiled.eval()
    assert not model.training
    compiled.train()
    assert model.training
    compiled.note = 3
    assert model.note == 3  # type: ignore[comparison-overlap]
    assert len(list(compiled.parameters())) == len(list(model.parameters()))


def test_a_copy_captures_too() -> None:
    compiled = copy.deepcopy(mokfx.compile(MoE(), options=EAGER))
    compiled(tokens())
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_function_keeps_its_name_and_takes_the_other_arguments() -> None:
    def double(x: Tensor) -> Tensor:
        """Twice."""
        return 2 * x

    compiled = mokfx.compile(double, fullgraph=True, dynamic=True, options=EAGER)
    assert (compiled.__name__, compiled.__doc__) == ("double", "Twice.")
    for number in (3, 4, 5):
        x = tokens(number)
        assert torch.equal(compiled(x), x + x)
    assert counters["stats"]["unique_graphs"] == 1
    assert mokfx.compile(double, disable=True) is double
