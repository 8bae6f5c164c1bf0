"""The reference provider against the oracle: in float64 to 1e-10, in lower precision against eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mokfx.ops import OP
from tests.ops import oracle
from tests.ops.cases import CASES, Case, Inputs, build


def run(inputs: Inputs, grad_y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """y and the gradients of the op at `inputs`."""
    inputs = inputs.require_grad()
    y = OP(*inputs.args, **inputs.settings)
    return y.detach(), list(torch.autograd.grad(y, inputs.leaves(), grad_y))


def run_oracle(inputs: Inputs, grad_y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same of the oracle; a tensor that it does not use has gradient 0."""
    inputs = inputs.require_grad()
    y = oracle.moe(*inputs.args, **inputs.settings)
    gradients = torch.autograd.grad(y, inputs.leaves(), grad_y, allow_unused=True, materialize_grads=True)
    return y.detach(), list(gradients)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_each_gradient_equal_the_oracles_in_float64(case: Case) -> None:
    inputs = build(case)
    grad_y = torch.randn(
        inputs.args[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    y, gradients = run(inputs, grad_y)
    expected_y, expected = run_oracle(inputs, grad_y)
    torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-10)
    assert y.is_contiguous()
    for index, (leaf, found, wanted) in enumerate(zip(inputs.leaves(), gradients, expected, strict=True)):
        assert found.dtype == leaf.dtype and found.shape == leaf.shape
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10), f"gradient {index}"


@pytest.mark.parametrize("activation", ["clamped_swiglu", "limited_swiglu"])
def test_the_clamp_is_exercised(activation: str) -> None:
    """Otherwise the cases of these would be those of swiglu, maybe with another scale."""
    case = Case(activation=activation)
    wide = build(case)
    wide.settings["activation_args"][-1] = 1e9
    narrow = build(case)
    assert not torch.equal(OP(*wide.args, **wide.settings), OP(*narrow.args, **narrow.settings))


def test_a_dropped_slots_weight_may_be_anything() -> None:
    inputs = build(Case(dropped=0.4)).require_grad()
    y = OP(*inputs.args, **inputs.settings)
    poisoned = build(Case(dropped=0.4))
    poisoned.args[2][poisoned.args[1] == -1] = torch.nan
    poisoned = poisoned.require_grad()
    y_poisoned = OP(*poisoned.args, **poisoned.settings)
    assert torch.equal(y, y_poisoned)
    y.sum().backward()
    y_poisoned.sum().backward()
    for leaf, other in zip(inputs.leaves(), poisoned.leaves(), strict=True):
        assert leaf.grad is not None and other.grad is not None and torch.equal(leaf.grad, other.grad)
    dropped = inputs.args[1] == -1
    assert dropped.any() and (inputs.args[2].grad[dropped] == 0).all()


def test_runs_repeat_bit_for_bit() -> None:
    inputs = build(Case(tokens=40, shared="apart+sigmoid", biases=True, dtype=torch.float32))
    grad_y = torch.randn(40, 8)
    y, gradients = run(inputs, grad_y)
    for _ in range(3):
        again, gradients_again = run(inputs, grad_y)
        assert torch.equal(y, again)
        assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))


def test_every_layout_of_the_same_weights_gives_the_same_numbers() -> None:
    base = Case(biases=True, shared="apart", tokens=20)
    y, _ = run(build(base), torch.ones(20, 8, dtype=torch.float64))
    for layout in ("apart", "gate_up", "up_gate", "interleaved"):
        for listed in (False, True):
            for transposed in (False, True):
                case = replace(base, gate_up=layout, listed=listed, transposed=transposed)
                other, _ = run(build(case), torch.ones(20, 8, dtype=torch.float64))
                torch.testing.assert_close(other, y, rtol=1e-12, atol=1e-12)


def test_non_contiguous_inputs_are_read_as_they_are() -> None:
    inputs = build(Case(tokens=12, shared="apart"))
    strange = inputs.map(lambda t: torch.stack((t, t), dim=-1)[..., 0])
    assert not strange.args[0].is_contiguous()
    grad_y = torch.ones(1, 1, dtype=torch.float64).expand(12, 8)
    y, gradients = run(inputs, grad_y.contiguous())
    y_strange, gradients_strange = run(strange, grad_y)
    torch.testing.assert_close(y_strange, y, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients, gradients_strange, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight_on", ["output", "hidden", "input"])
def test_gradcheck(weight_on: str) -> None:
    case = Case(
        tokens=3, hidden=3, inner=2, experts=3, weight_on=weight_on, biases=True, shared="fused+sigmoid"
    )
    inputs = build(case).require_grad()
    leaves = inputs.leaves()

    def call(*values: Tensor) -> Tensor:
        by_leaf = dict(zip(map(id, leaves), values, strict=True))
        given = inputs.map(lambda t: by_leaf.get(id(t), t))
        return OP(*given.args, **given.settings)

    assert torch.autograd.gradcheck(call, leaves)


def test_expected_roundings_of_the_output() -> None:
    """One token, one expert, numbers chosen so that each rounding shows: h and the slot's output in bf16."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    third, x = one * 0.333, one * 3
    settings = {"num_experts": 1, "activation": "relu", "out_dtype": torch.float32}
    y = OP(x, torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 0.7), [], [third], [third], **settings)
    hidden = (x.float() * third.float()).bfloat16()
    slot = (hidden.float() * third.float()).bfloat16()
    assert y.dtype == torch.float32 and torch.equal(y, slot.float() * 0.7)


def test_expected_roundings_of_the_shared_expert() -> None:
    """Its output is rounded to bf16 once, after its gate, and added in float32."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    third, x = one * 0.333, one * 3
    shared = {"shared_w_gate": third, "shared_w_up": third, "shared_w_down": third, "shared_sigmoid": third}
    settings: dict[str, Any] = {"num_experts": 1, "activation": "relu", "out_dtype": torch.float32, **shared}
    ids, weights = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 0.7)
    y = OP(x, ids, weights, [], [third], [third], **settings)
    routed = OP(
        x, ids, weights, [], [third], [third], num_experts=1, activation="relu", out_dtype=torch.float32
    )
    first = x.float() * third.float()
    hidden = (first * torch.sigmoid(first) * first).bfloat16().float()
    expected = (hidden * third.float() * torch.sigmoid(first)).bfloat16().float()
    assert torch.equal(y, routed + expected)


def test_weights_in_float32_under_bfloat16_are_not_rounded() -> None:
    case = Case(dtype=torch.bfloat16, weights_dtype=torch.float32, out_dtype=torch.float32, choices=1)
    inputs = build(case)
    inputs.args[2].fill_(1.0)
    plain = OP(*inputs.args, **inputs.settings)
    inputs.args[2].fill_(1.0 + 2**-20)
    assert torch.equal(OP(*inputs.args, **inputs.settings), plain * (1.0 + 2**-20))


def _eager(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, on: str
) -> Tensor:
    """What a model would write: a loop over experts, index_add."""
    y = torch.zeros_like(x)
    for e in range(gate.shape[0]):
        token, choice = torch.where(ids == e)
        weight = weights[token, choice, None]
        rows = x[token] * weight if on == "input" else x[token]
        hidden = F.silu(rows @ gate[e]) * (rows @ up[e])
        hidden = hidden * weight if on == "hidden" else hidden
        out = hidden @ down[e]
        y = y.index_add(0, token, out * weight if on == "output" else out)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_on", ["output", "hidden", "input"])
def test_error_against_float64_is_at_most_twice_that_of_eager(dtype: torch.dtype, weight_on: str) -> None:
    case = Case(tokens=96, hidden=64, inner=48, experts=8, choices=3, dtype=dtype, weight_on=weight_on)
    inputs = build(case)
    grad_y = torch.randn(96, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    exact = inputs.map(lambda t: t.double() if t.is_floating_point() else t)
    y, gradients = run(inputs, grad_y)
    y_exact, gradients_exact = run(exact, grad_y.double())
    eager = inputs.require_grad()
    x, ids, weights, (gate,), (up,), (down,) = eager.args
    y_eager = _eager(x, ids, weights, gate, up, down, weight_on)
    gradients_eager = torch.autograd.grad(y_eager, eager.leaves(), grad_y)

    def error(found: Tensor, true: Tensor) -> float:
        return float((found.double() - true).norm() / true.norm())

    assert error(y, y_exact) <= 2 * error(y_eager.detach(), y_exact)
    for found, plain, true in zip(gradients, gradients_eager, gradients_exact, strict=True):
        assert error(found, true) <= 2 * error(plain, true)
