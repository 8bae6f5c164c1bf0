"""What the provider says that it cannot do, and how it reads weights in place. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mokfx.kernels import provider
from mokfx.kernels.activation import GAUSS, RELU, RELU_SQUARED, SIGMOID, activation, biases
from mokfx.kernels.weights import BLOCKS, INTERLEAVED, UNGATED, FirstLayer, Matrices, first_layer, matrices
from mokfx.ops.activations import ACTIVATIONS
from mokfx.ops.arguments import Call


def call(**changes: object) -> Call:
    """A call that the kernel can run, with changes."""
    weights = {
        "gate": (8, 192, 128),
        "up": (8, 192, 128),
        "down": (8, 128, 192),
    }  # [E, in, out], as nn.Linear
    gate, up, down = (
        torch.empty(e, outs, ins, dtype=torch.bfloat16).transpose(1, 2) for e, ins, outs in weights.values()
    )
    base = Call(
        torch.empty(5, 192, dtype=torch.bfloat16),
        torch.zeros(5, 2, dtype=torch.int64),
        torch.empty(5, 2),
        [gate],
        [up],
        [down],
        num_experts=8,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def shared(width: int, step: int = 1) -> dict[str, object]:
    """A shared expert whose down weight has a stride of `step` in both dimensions."""
    return {
        "shared_w_gate": torch.empty(192, 2 * width, dtype=torch.bfloat16),
        "shared_w_down": torch.empty(width, 192, step, dtype=torch.bfloat16)[..., 0],
    }


def test_a_plain_call_is_supported() -> None:
    assert provider.call_reason(call()) is None


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_fused_gate_and_up_are_supported(layout: str) -> None:
    fused = torch.empty(8, 256, 192, dtype=torch.bfloat16).transpose(1, 2)
    assert provider.call_reason(call(w_gate=[fused], w_up=[], gate_up=layout)) is None


CHANGES: dict[str, Callable[[], dict[str, object]]] = {
    "needs gradients": lambda: {"topk_weights": torch.empty(5, 2, requires_grad=True), "weight_on": "input"},
    "expert-parallel group": lambda: {"group_name": "0"},
    "torch.float16": lambda: {"x": torch.empty(5, 192, dtype=torch.float16)},
    "y torch.float32": lambda: {"out_dtype": torch.float32},
    "the shared expert's width is 40": lambda: shared(40),
    "the shared expert: expert weights": lambda: shared(64, step=2),
    "H is 200": lambda: {"x": torch.empty(5, 200, dtype=torch.bfloat16)},
    "600 experts": lambda: {"num_experts": 600},
    "40 choices": lambda: {"topk_ids": torch.zeros(5, 40, dtype=torch.int64)},
    "neither in nor out": lambda: {"w_down": [torch.empty(8, 128, 192, 2, dtype=torch.bfloat16)[..., 0]]},
    "not in 16 bytes": lambda: {"w_down": [torch.empty(8, 128, 193, dtype=torch.bfloat16)[..., :192]]},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_every_refusal_says_why(reason: str) -> None:
    assert reason in (provider.call_reason(call(**CHANGES[reason]())) or "")


def test_the_layer_of_gpt_oss_is_supported() -> None:
    bias = {
        name: [torch.empty(8, n, dtype=torch.bfloat16)] for name, n in (("b_gate", 128), ("b_up", 128), ("b_down", 192))
    }
    assert provider.call_reason(call(activation="clamped_swiglu", activation_args=[1.702, 7.0], **bias)) is None


CURVES = {
    SIGMOID: lambda act, z: z * torch.sigmoid(z * (act.linear + act.cubic * z * z)),
    GAUSS: lambda act, z: torch.nn.functional.gelu(z),
    RELU: lambda act, z: torch.relu(z),
    RELU_SQUARED: lambda act, z: torch.relu(z).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_the_ops(name: str) -> None:
    arguments = {"clamped_swiglu": [1.702, 7.0], "limited_swiglu": [7.0]}.get(name, [])
    act = activation(name, arguments)
    assert act.gated == ACTIVATIONS[name].gated
    gate, up = (torch.linspace(-12, 12, 97, dtype=torch.float64) for _ in range(2))
    gate, up = gate[:, None].expand(97, 97), up.expand(97, 97)
    if act.gated:
        g, u = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        ours = CURVES[act.curve](act, g) * (u + act.offset)
    else:
        ours = CURVES[act.curve](act, up)
    torch.testing.assert_close(ours, ACTIVATIONS[name].value(gate, up, arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_fused_biases_are_told_apart(layout: str) -> None:
    gate, up = torch.arange(6.0).view(2, 3), -torch.arange(6.0).view(2, 3)
    if layout == "interleaved":
        fused = torch.stack([gate, up], -1).flatten(-2)
    else:
        fused = torch.cat([gate, up] if layout == "gate_up" else [up, gate], -1)
    for given in ([fused], list(fused)):
        found = biases(given, None, None, layout)
        assert found.gate is not None and found.up is not None and found.down is None
        assert torch.equal(found.gate, gate) and torch.equal(found.up, up)


def test_the_first_layer_of_each_layout() -> None:
    weight = torch.empty(8, 192, 256, dtype=torch.bfloat16)  # [in, out]
    turned = torch.empty(8, 256, 192, dtype=torch.bfloat16).transpose(1, 2)
    kinds = {
        (weight, "interleaved"): INTERLEAVED,  # its columns cannot be told apart by TMA
        (turned, "interleaved"): BLOCKS,
        (weight, "gate_up"): BLOCKS,
        (weight, "up_gate"): BLOCKS,
    }
    for (fused, layout), kind in kinds.items():
        first = first_layer([fused], [], layout, with_address=False)
        assert isinstance(first, FirstLayer) and first.kind == kind
        assert (first.gate == first.up) == (kind == INTERLEAVED)
        assert provider.call_reason(call(w_gate=[fused], w_up=[], gate_up=layout)) is None
    ungated = first_layer([], [weight], "apart", with_address=False)
    assert isinstance(ungated, FirstLayer) and ungated.kind == UNGATED


def test_too_many_tokens_are_refused() -> None:
    many = torch.empty(1, dtype=torch.bfloat16).expand(2**21, 192)
    ids = torch.zeros(1, dtype=torch.int64).expand(2**21, 2)
    assert "4194304 slots" in (provider.call_reason(call(x=many, topk_ids=ids)) or "")


def test_fake_tensors_are_asked_about_too() -> None:
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        assert provider.call_reason(call()) is None


def test_a_machine_without_a_gpu_is_told() -> None:
    assert "x is on cpu" in (provider.supports(call()) or "")


def test_training_is_supported() -> None:
    assert provider.call_reason(call(topk_weights=torch.empty(5, 2, requires_grad=True))) is None


def test_listed_weights_are_supported() -> None:
    assert provider.call_reason(call(w_down=list(call().w_down[0]))) is None


def test_stacks_are_read_in_place() -> None:
    weight = torch.empty(8, 128, 192, dtype=torch.bfloat16)  # [E, in, out] side by side
    start, spacing = weight.data_ptr(), 128 * 192
    found = matrices([weight])
    assert found == Matrices((start,), 8, 128, 192, spacing, 192, 1)
    assert isinstance(found, Matrices) and found.n_major and not found.listed
    assert first_layer([weight], [], "up_gate") == FirstLayer(
        Matrices((start + 96 * 2,), 8, 128, 96, spacing, 192, 1),
        Matrices((start,), 8, 128, 96, spacing, 192, 1),
    )
    assert matrices([weight.transpose(1, 2)]) == Matrices((start,), 8, 192, 128, spacing, 1, 192)


def test_lists_are_read_in_place() -> None:
    weights = [torch.empty(192, 128, dtype=torch.bfloat16).t() for _ in range(3)]  # nn.Linear's, as [in, out]
    starts = tuple(weight.data_ptr() for weight in weights)
    assert matrices(weights) == Matrices(starts, 3, 128, 192, 0, 1, 128)
    both = first_layer(weights, [], "interleaved")
    assert isinstance(both, FirstLayer)
    assert both.up == Matrices(tuple(start + 256 for start in starts), 3, 128, 96, 0, 1, 256)
    assert "different strides" in str(matrices([*weights, torch.empty(128, 192, dtype=torch.bfloat16)]))


def test_one_expert_and_expanded_stacks_are_lists() -> None:
    one = torch.empty(1, 128, 192, dtype=torch.bfloat16)
    found = matrices([one.expand(4, 128, 192)])
    assert isinstance(found, Matrices) and found.listed
    assert found.addresses == (one.data_ptr(),) * 4
    found = matrices([one])
    assert isinstance(found, Matrices) and found.listed
