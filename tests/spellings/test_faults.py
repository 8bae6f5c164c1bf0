"""Faults are faults: each runs, and changes a value or a gradient of its layer, or lets one out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from .capture import capture
from .faults import FAULTS, Fault, plant
from .layer import MoE, build
from .spelling import Sizes, Spelling
from .strangers import NEEDS_GROUP, STRANGERS
from .strategies import FIXED, faulty_spellings
from .test_spellings import dtype_of, loss_of, run

HOME = Spelling(router="softmax_topk_renormalised", shared="linear", products="padded_bmm")
SILENT = {"buffer_of_outputs", "buffer_of_counts"}
"""These change nothing that is compared below: they leave a trace in the model."""


def values_of(layer: MoE, own: list[str]) -> list[Tensor | None]:
    """The output, and the gradients of x and of the parameters named in `own`."""
    x, token_ids = layer.example()
    parameters = dict(layer.named_parameters())
    y, extra = run(layer, x, token_ids)
    leaves = [x, *(parameters[name] for name in own)]
    return [y.detach(), *torch.autograd.grad(loss_of(y, extra), leaves, allow_unused=True)]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return (a is None or not a.any()) and (b is None or not b.any())
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.fits(HOME) and not f.forward_only])
@pytest.mark.parametrize("products", ["padded_bmm", "loop_split"])
def test_a_fault_changes_something(name: str, products: str) -> None:
    spelling = Spelling(router=HOME.router, shared=HOME.shared, products=products)
    right, faulty = build(spelling), plant(FAULTS[name], build(spelling))
    own = [name for name, _ in right.named_parameters()]
    pairs = zip(values_of(right, own), values_of(faulty, own), strict=True)
    assert all(same(a, b) for a, b in pairs) == (name in SILENT)


@settings(FIXED, max_examples=300)
@given(faulty_spellings(exchanged=False))
def test_faulty_layers_run(drawn: tuple[Spelling, Fault]) -> None:
    spelling, fault = drawn
    layer = plant(fault, build(spelling, dtype=dtype_of(spelling)))
    x, token_ids = layer.example()
    result = layer(x, token_ids)
    y = result[0] if isinstance(result, tuple) else result
    assert y.shape == x.shape
    if y.requires_grad and not fault.forward_only:
        y.sum().backward()


def test_tokens_in_place_changes_x() -> None:
    layer = plant(FAULTS["tokens_in_place"], build(HOME))
    x, token_ids = layer.example()
    before = x.detach().clone()
    layer(x, token_ids)
    assert torch.equal(x, before / 2)


def test_a_fault_without_effect() -> None:
    with pytest.raises(ValueError, match="gradient_scaled has no effect on default"):
        plant(FAULTS["gradient_scaled"], build(Spelling()))


@pytest.mark.parametrize("name", sorted(set(STRANGERS) - NEEDS_GROUP))
def test_strangers_run(name: str) -> None:
    wrong, make = STRANGERS[name]
    x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    y = make(Sizes(), None, torch.float64)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert wrong
    assert y.shape == x.shape
    assert grad.any()


@pytest.fixture
def fake_group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("whole", ["", "einsum_gshard"])
def test_exchange_faults_are_captured(whole: str, fake_group: Any) -> None:
    spelling = Spelling(exchange="functional", products="padded_bmm", whole=whole)
    faults = [f for f in FAULTS.values() if f.fits(spelling) and not f.fits(HOME)]
    assert len(faults) > 5
    for fault in faults:
        layer = plant(fault, build(spelling, group=fake_group))
        assert len(capture(layer, *layer.example()).graph.nodes) > 10, fault.name


def test_unrelated_exchange_is_captured(fake_group: Any) -> None:
    module = STRANGERS["sequence_parallel"][1](Sizes(), fake_group, torch.float64)
    assert len(capture(module, torch.randn(16, 16, dtype=torch.float64)).graph.nodes) > 5
