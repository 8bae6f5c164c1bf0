"""`mokfx.check`: what it says of right and of wrong compiled models, and that it leaves no trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule

import mokfx
from mokfx.check import CheckResult, Comparison

from . import models


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_good_model_is_good_in_every_dtype(dtype: torch.dtype) -> None:
    result = mokfx.check(models.compiled(models.layer(dtype)), models.tokens(dtype))
    assert result.ok, str(result)
    assert result.dtype == str(dtype).removeprefix("torch.")
    assert {c.name for c in result.comparisons} >= {"output", "grad input[0]", "grad moe.router.weight"}
    assert all(c.units <= 3 and c.same_bits for c in result.comparisons)
    if dtype == torch.bfloat16:
        assert all(1e-4 < c.eager < 0.1 for c in result.comparisons)  # it was compared in another precision


def test_a_plain_model_is_compiled_for_it_and_by_inductor() -> None:
    model = models.layer(torch.bfloat16)
    result = mokfx.check(model, models.tokens(torch.bfloat16))
    assert result.ok, str(result)
    assert len(result.report.matches) == 1


def test_its_text() -> None:
    result = mokfx.check(models.compiled(models.layer()), models.tokens())
    text = re.sub(r"[ \d]{4}\.\d\d$", "  <units>", re.sub(r"\d\.\de[+-]\d\d", "<error>", str(result)), flags=re.M)
    assert_expected_inline(
        re.sub(r"\(\d\.\d\d in [^)]*\)", "(...)", text),
        """\
float32; 1 MoE layer became mok.moe

                                   error     error  in units
                                of eager  compiled  of eager
output                           <error>   <error>     <units>
grad moe.router.weight           <error>   <error>     <units>
grad moe.experts.0.gate.weight   <error>   <error>     <units>
grad moe.experts.0.up.weight     <error>   <error>     <units>
grad moe.experts.0.down.weight   <error>   <error>     <units>
grad moe.experts.1.gate.weight   <error>   <error>     <units>
grad moe.experts.1.up.weight     <error>   <error>     <units>
grad moe.experts.1.down.weight   <error>   <error>     <units>
grad moe.experts.2.gate.weight   <error>   <error>     <units>
grad moe.experts.2.up.weight     <error>   <error>     <units>
grad moe.experts.2.down.weight   <error>   <error>     <units>
grad moe.experts.3.gate.weight   <error>   <error>     <units>
grad moe.experts.3.up.weight     <error>   <error>     <units>
grad moe.experts.3.down.weight   <error>   <error>     <units>
grad input[0]                    <error>   <error>     <units>

good: no error is more than 3 units (...), and two
  runs of the compiled model gave the same bits""",
    )


def test_many_rows_are_shown_as_the_worst_of_each_group() -> None:
    def row(i: int) -> Comparison:
        return Comparison(f"grad layers.{i % 2}.experts.{i}.up.weight", 1e-3, 1e-3 * (5 if i == 7 else 1), 1e-3, i != 3)

    rows = (Comparison("output", 1e-3, 1e-3, 1e-3, True), *(row(i) for i in range(30)))
    result = CheckResult("bfloat16", rows, mokfx.Report(()))
    assert_expected_inline(
        "\n".join(result.table(72)),
        """\
xN: the worst of N                        error     error  in units
                                       of eager  compiled  of eager
output                                  1.0e-03   1.0e-03      1.00
grad layers.*.experts.*.up.weight x30   1.0e-03   1.0e-03      1.00  <--""",
    )
    assert_expected_inline(
        "\n".join(result.verdict(60)),
        """\
not good: no MoE layer was rewritten, so this says nothing
  about mok.moe
not good: grad layers.1.experts.7.up.weight is more than 3
  units from float64
not good: grad layers.1.experts.3.up.weight is not the same
  bits in two runs of the compiled model""",
    )
    assert len(list(result.table(80, every=True))) == 2 + 31


class Bent(torch.nn.Module):
    """Runs a captured graph, and changes what it gives."""

    def __init__(self, graph: GraphModule, bend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.graph, self.bend = graph, bend

    def forward(self, *inputs: Any) -> Any:
        return tuple(self.bend(y) if isinstance(y, Tensor) and y.dim() == 2 else y for y in self.graph(*inputs))


def bent(bend: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> CheckResult:
    """The check of a layer whose compiled output is bent."""
    torch._dynamo.reset()
    model = models.layer(dtype)
    backend: Any = lambda graph, _: Bent(graph, bend).forward  # noqa: E731
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        return mokfx.check(torch.compile(model, backend=backend, fullgraph=True), models.tokens(dtype))


def test_straight_it_is_good() -> None:
    assert bent(lambda y: y * 1).ok


def one_token(y: Tensor) -> Tensor:
    scale = torch.ones(y.shape[0], 1, dtype=y.dtype)
    scale[5] = 1.2
    return y * scale


def test_one_wrong_token_is_found_and_counted() -> None:
    result = bent(one_token)
    assert not result.ok
    (output,) = (c for c in result.comparisons if c.name == "output")
    assert output.units > 10 and (output.far_rows, output.rows) == (1, 24)
    assert_expected_inline(
        "\n".join(result.verdict())[-150:],
        """\
m float64
  1 of 24 rows of output are far off, the others are not: two experts may tie
    there in this dtype; check the model in float32 to be sure""",
    )


def test_a_lost_gradient_is_found() -> None:
    result = bent(lambda y: y.detach() + 0 * y.sum().detach())
    notes = {c.name: c.note for c in result.far}
    assert notes["grad moe.router.weight"] == "has no gradient"
    assert "output" not in notes


def test_other_bits_are_found() -> None:
    count = iter(range(100))
    result = bent(lambda y: y * (1 + 1e-7 * next(count)), torch.float32)
    assert not result.ok
    assert [p for p in result.problems if "not the same bits in two runs" in p]
    assert not result.far


def test_without_a_layer_it_says_nothing() -> None:
    model, args = models.without_moe()
    result = mokfx.check(model, *args)
    assert result.problems == ("no MoE layer was rewritten, so this says nothing about mok.moe",)


def test_nothing_remains_of_it() -> None:
    model = models.layer(torch.bfloat16).train()
    model.moe.router.weight.grad = torch.ones_like(model.moe.router.weight)
    x = models.tokens(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, kept = torch.get_rng_state(), x.clone()
    mokfx.check(models.compiled(model), x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype == before[name].dtype
    assert model.last is None
    assert torch.equal(x, kept) and not x.requires_grad and x.grad is None
    assert torch.equal(torch.get_rng_state(), random) and torch.get_default_dtype() == torch.float32
    assert model.moe.router.weight.grad.eq(1).all() and model.moe.experts[0].up.weight.grad is None
    assert isinstance(model.moe.router.weight, nn.Parameter)


def test_without_gradients_there_are_only_outputs() -> None:
    with torch.no_grad():
        result = mokfx.check(models.compiled(models.layer()), models.tokens())
    assert result.ok and [c.name for c in result.comparisons] == ["output"]


def test_a_function_may_change_its_input_in_place_and_have_several_outputs() -> None:
    model = models.layer()

    def function(x: Tensor, *, scale: float) -> dict[str, Tensor]:
        x.mul_(scale)
        return {"y": model.moe(x), "ids": model.moe.router(x).topk(2)[1]}

    x = models.tokens()
    result = mokfx.check(models.compiled(function), x, scale=2.0)
    assert result.ok, str(result)
    assert [c.name for c in result.comparisons] == ["output[0]", "output[1]", "grad input[0]"]
    assert torch.equal(x, models.tokens())


def test_under_autocast_the_unit_is_autocasts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = mokfx.check(models.compiled(models.layer()), models.tokens())
    assert result.ok, str(result)
    assert result.dtype == "bfloat16"


def test_json_has_every_number() -> None:
    result = mokfx.check(models.compiled(models.layer()), models.tokens())
    said = result.as_dict()
    assert said["ok"] is True and len(said["comparisons"]) == len(result.comparisons)
    assert said["comparisons"][0]["units"] == result.comparisons[0].units
    assert said["matches"][0]["num_experts"] == "4"
