"""Views, broadcasts and reads of facts are those of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mokfx.passes.terms import add
from mokfx.passes.value import Value, align, fresh, leaf_value, permute, reshape

from .evaluate import Evaluator, elements, leaf
from .test_terms import MANY


def tensor_of(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).view(shape)


def fact_of(tensor: torch.Tensor) -> Value:
    return leaf_value(leaf(tensor), tuple(tensor.shape))


def assert_is(value: Value | None, tensor: torch.Tensor) -> None:
    assert value is not None
    torch.testing.assert_close(elements(value, Evaluator()), tensor, rtol=0, atol=0)


@st.composite
def shapes(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements: neighbours joined, dimensions split, ones put in and left out."""
    shape: list[int] = []
    for size in sizes:
        low = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])) if size else 1
        parts = draw(st.sampled_from([[size // low, low], [size]]))
        if shape and draw(st.booleans()):
            shape[-1] *= parts.pop(0)
        shape += parts + draw(st.sampled_from([[], [1]]))
    return tuple(shape)


@MANY
@given(st.data())
def test_reshape_and_permute(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    tensor = tensor_of(*sizes)
    value = fact_of(tensor)
    for _ in range(3):
        shape = data.draw(shapes(tuple(tensor.shape)))
        reshaped = reshape(value, shape)
        if reshaped is None:
            return
        tensor = tensor.reshape(shape)
        assert_is(reshaped, tensor)
        order = data.draw(st.permutations(range(tensor.dim())))
        value, tensor = permute(reshaped, order), tensor.permute(order)
        assert_is(value, tensor)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((4, 3), (12,)), ((12,), (4, 3)), ((2, 6), (4, 3)), ((4, 1, 3), (4, 3)), ((6,), (1, 6, 1)), ((1,), ())],
)
def test_reshape_is_known(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    tensor = tensor_of(*sizes)
    assert_is(reshape(fact_of(tensor), shape), tensor.reshape(shape))


def test_sizes_that_do_not_divide() -> None:
    assert reshape(fact_of(tensor_of(4, 9)), (6, 6)) is None


@MANY
@given(st.data())
def test_broadcast(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    tensors = []
    for _ in range(2):
        kept = [size if data.draw(st.booleans()) else 1 for size in sizes]
        tensors.append(tensor_of(*kept[data.draw(st.integers(0, len(kept) - 1)) :]))
    axes, bodies = align([fact_of(t) for t in tensors])
    assert_is(Value(axes, add(bodies)), tensors[0] + tensors[1])


@pytest.mark.parametrize("sizes", [(0,), (0, 3), (3, 0)])
def test_no_elements(sizes: tuple[int, ...]) -> None:
    tensor = tensor_of(*sizes)
    assert_is(fact_of(tensor), tensor)
    assert_is(reshape(fact_of(tensor), (0,)), tensor.reshape(0))


def test_fresh_variables() -> None:
    tensor = tensor_of(2, 3)
    value = fact_of(tensor)
    again = fresh(value)
    assert not {v for a in again.axes for v in a} & {v for a in value.axes for v in a}
    assert_is(again, tensor)
