"""Every setting of the op that the Hopper provider takes, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from mokfx.kernels import provider
from mokfx.ops import OP, Call, use_provider
from mokfx.ops.activations import ACTIVATIONS
from mokfx.ops.capacity import kept_ids
from tests.gpu.moe_case import error, poison
from tests.ops.cases import Case, Inputs, build

pytestmark = pytest.mark.gpu

BASE = Case(
    tokens=333,
    hidden=320,
    inner=192,
    experts=8,
    choices=2,
    shared_inner=448,
    dtype=torch.bfloat16,
    weights_dtype=torch.float32,
)


def made(**changes: Any) -> Inputs:
    return build(replace(BASE, **changes), seed=torch.randint(2**31, ()).item()).map(lambda tensor: tensor.cuda())


def ours(inputs: Inputs) -> Tensor:
    poison(0.5)
    with use_provider("hopper"):
        y: Tensor = OP(*inputs.args, **inputs.settings)
    return y


def truth(inputs: Inputs) -> Tensor:
    wide = inputs.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    with use_provider("reference"):
        y: Tensor = OP(*wide.args, **wide.settings)
    return y


def unfused(inputs: Inputs) -> Tensor:
    """Every product and every step between in bf16, as a model's own code would."""
    call = Call(*inputs.args, **inputs.settings)
    ids, dtype = kept_ids(call), call.x.dtype
    y = torch.zeros(call.x.shape, dtype=torch.float32, device="cuda")
    for choice in range(ids.shape[1]):
        slots = torch.zeros_like(call.x)
        for expert in range(call.num_experts):
            at = (ids[:, choice] == expert).nonzero().squeeze(1)
            slots[at] = _network(call, expert, call.x[at], call.topk_weights[at, choice, None].to(dtype))
        weight = call.topk_weights[:, choice, None].float() if call.weight_on == "output" else 1.0
        y += slots.float() * weight
    if (shared := call.shared()) is not None and shared.gate is not None:
        output = torch.nn.functional.silu(call.x @ shared.gate) * (call.x @ shared.up) @ shared.down
        if call.shared_sigmoid is not None:
            output = output * torch.sigmoid(call.x @ call.shared_sigmoid)
        y += output.float()
    return y.to(dtype)


def _network(call: Call, expert: int, rows: Tensor, weight: Tensor) -> Tensor:
    network = call.expert(expert)
    if call.weight_on == "input":
        rows = rows * weight
    gate = None if network.gate is None else rows @ network.gate
    up = rows @ network.up
    if network.up_bias is not None:
        up = up + network.up_bias
    if gate is not None and network.gate_bias is not None:
        gate = gate + network.gate_bias
    hidden = ACTIVATIONS[network.activation].value(gate, up, network.activation_args)
    output = (hidden * weight if call.weight_on == "hidden" else hidden) @ network.down
    return output if network.down_bias is None else output + network.down_bias


def check(inputs: Inputs) -> None:
    expected = truth(inputs)
    found, plain = error(ours(inputs), expected), error(unfused(inputs), expected)
    assert found <= 1.5 * plain, f"relative error {found:.2e}, of an unfused bf16 computation {plain:.2e}"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(torch.randint(2**31, ()).item())
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, biases: bool) -> None:
    check(made(activation=activation, biases=biases))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("layout", ["apart", "gate_up", "up_gate", "interleaved"])
def test_layouts(layout: str, listed: bool, transposed: bool) -> None:
    check(made(gate_up=layout, listed=listed, transposed=transposed))
    check(made(gate_up=layout, listed=listed, transposed=transposed, activation="clamped_swiglu", biases=True))


@pytest.mark.parametrize("layout", ["apart", "gate_up", "interleaved"])
def test_the_layout_changes_no_bit(layout: str) -> None:
    """The same values in another layout, for the plain and for the general kernel."""
    for biases in (False, True):
        case = replace(BASE, biases=biases)
        first, other = build(case), build(replace(case, gate_up=layout, transposed=True, listed=True))
        assert torch.equal(*(ours(one.map(lambda tensor: tensor.cuda())) for one in (first, other)))


@pytest.mark.parametrize("weight_on", ["output", "hidden", "input"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_where_weights_apply(weight_on: str, activation: str) -> None:
    check(made(weight_on=weight_on, activation=activation, biases=True, dropped=0.2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shared", ["apart", "fused", "apart+sigmoid", "fused+sigmoid"])
@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_shared_expert(shared: str, tokens: int, transposed: bool) -> None:
    check(made(shared=shared, tokens=tokens, transposed=transposed, hidden=256, inner=128))


def test_shared_expert_where_all_slots_are_dropped() -> None:
    check(made(shared="apart", dropped=1.0))


@pytest.mark.parametrize("order", ["choice", "token"])
@pytest.mark.parametrize("capacity", [0, 1, 40, 1000])
def test_capacity(capacity: int, order: str) -> None:
    check(made(capacity=capacity, capacity_order=order, shared="apart", tokens=2000))


def test_everything_at_once() -> None:
    check(
        made(
            activation="clamped_swiglu",
            gate_up="interleaved",
            biases=True,
            weight_on="input",
            shared="fused+sigmoid",
            dropped=0.1,
            capacity=70,
        )
    )


def saved_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What the forward kept for each slot that was not dropped, and the same from plain products."""
    call = Call(*inputs.args, **inputs.settings)
    with use_provider("hopper"):
        _, saved = torch.ops.mok.moe_forward(*inputs.args, **inputs.settings)
    assert saved.shape == provider.saved_shape(call)
    flat, begin, found, expected = call.topk_ids.flatten(), 0, [], []
    for expert in range(call.num_experts):
        at, network = (flat == expert).nonzero().squeeze(1), call.expert(expert)
        rows = call.x[at // call.topk_ids.shape[1]].double()
        layers = [(network.gate, network.gate_bias)] if network.gate is not None else []
        for part, (weight, bias) in enumerate([*layers, (network.up, network.up_bias)]):
            assert weight is not None
            product = rows @ weight.double()
            expected.append(product if bias is None else product + bias.double())
            found.append(saved[part, begin : begin + at.numel()])
        begin += -(-at.numel() // 64) * 64
    return torch.cat(found), torch.cat(expected)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu"])
@pytest.mark.parametrize("layout", ["apart", "interleaved"])
@pytest.mark.parametrize("biases", [False, True])
def test_what_is_kept_for_the_backward(activation: str, layout: str, biases: bool) -> None:
    layout = layout if ACTIVATIONS[activation].gated else "apart"
    inputs = made(activation=activation, gate_up=layout, biases=biases, dropped=0.1, shared="apart")
    poison(0.5)
    found, expected = saved_rows(inputs)
    assert error(found, expected) <= 2**-8
    with use_provider("hopper"):
        assert torch.equal(
            torch.ops.mok.moe_forward(*inputs.args, **inputs.settings)[0], OP(*inputs.args, **inputs.settings)
        )
