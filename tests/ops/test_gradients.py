"""How the op takes part in autograd: which gradients, of what layout, through what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mokfx.ops import OP
from tests.ops.cases import Case, Inputs, build


def _call(inputs: Inputs) -> Tensor:
    return OP(*inputs.args, **inputs.settings)


@pytest.mark.parametrize("index", range(5))
def test_a_gradient_is_made_only_where_it_is_needed(index: int) -> None:
    inputs = build(Case())
    leaf = inputs.leaves()[index].requires_grad_()
    _call(inputs).sum().backward()
    assert leaf.grad is not None
    assert all(other.grad is None for other in inputs.leaves() if other is not leaf)


def test_no_graph_is_made_where_no_gradient_is_needed() -> None:
    assert not _call(build(Case())).requires_grad
    with torch.no_grad():
        assert not _call(build(Case()).require_grad()).requires_grad


def test_the_backward_is_one_call_and_forward_keeps_only_the_inputs() -> None:
    inputs = build(Case(shared="fused+sigmoid", biases=True, listed=True)).require_grad()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = _call(inputs)
    storages = {t.untyped_storage().data_ptr() for t in (*inputs.leaves(), inputs.args[1])}
    assert len(saved) == len(inputs.leaves()) + 1
    assert {t.untyped_storage().data_ptr() for t in saved} == storages
    with torch.profiler.profile() as profile:
        y.sum().backward()
    calls = [event.count for event in profile.key_averages() if event.key == "mok::moe_backward"]
    assert calls == [1]


def test_the_gradient_of_a_linear_weight_has_its_layout() -> None:
    """So that the optimiser's state and the parameter agree, and nothing is copied to make them."""
    linear = torch.nn.Parameter(torch.randn(4, 6, 8))  # [E, out, in]
    down = torch.nn.Parameter(torch.randn(4, 8, 6))
    ids, weights = torch.randint(4, (9, 2)), torch.rand(9, 2)
    w_up, w_down = [linear.transpose(1, 2)], [down.transpose(1, 2)]
    OP(torch.randn(9, 8), ids, weights, [], w_up, w_down, num_experts=4, activation="relu").sum().backward()
    for parameter in (linear, down):
        assert parameter.grad is not None and parameter.grad.is_contiguous()
        assert parameter.grad.abs().sum() > 0


def test_an_expert_without_tokens_gets_zeros() -> None:
    inputs = build(Case(only=(1,), choices=1, listed=True, biases=True)).require_grad()
    _call(inputs).sum().backward()
    for layer in (*inputs.args[3:], *(inputs.settings[name] for name in ("b_gate", "b_up", "b_down"))):
        assert [bool(t.grad.any()) for t in layer] == [False, True, False, False]


def test_a_second_derivative_says_that_there_is_none() -> None:
    inputs = build(Case()).require_grad()
    (dx,) = torch.autograd.grad(_call(inputs).square().sum(), inputs.args[0], create_graph=True)
    with pytest.raises(NotImplementedError) as error:
        dx.sum().backward()
    assert str(error.value) == (
        "mok.moe has no second derivative: its backward cannot be differentiated; "
        "use the eager model where gradients of gradients are needed"
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    plain, again = build(Case()).require_grad(), build(Case()).require_grad()

    def body(*args: Any) -> Tensor:
        return OP(*args, **again.settings).sin()

    _call(plain).sin().sum().backward()
    checkpoint(body, *again.args, use_reentrant=reentrant).sum().backward()
    assert torch.equal(again.args[0].grad, plain.args[0].grad)
    if not reentrant:  # the reentrant form passes no gradients through lists
        for a, b in zip(plain.leaves(), again.leaves(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    inputs = build(Case()).require_grad()
    y = _call(inputs)
    with torch.no_grad():
        inputs.args[5][0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensor_used_twice_gets_the_sum_of_its_gradients() -> None:
    shared = torch.randn(1, 8, 8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 8, dtype=torch.float64)
    ids, weights = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: OP(x, ids, weights, [w], [w], [w], num_experts=1), shared)
