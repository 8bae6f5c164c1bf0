"""The float32 truth agrees with the op in float64, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mokfx.bench.layer import INPUTS
from mokfx.bench.truth import distances, truth, wrong
from mokfx.ops import OP

from .layers import SHAPES, small


def in_float64(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """y and the gradients of a small layer by the op's reference, from float64 tensors."""
    layer = small(kind)
    wide = replace(layer, **{name: tensor.detach().double() for name, tensor in layer.inputs().items()})
    wide.require_gradients(True)
    positional, keywords = wide.call().arguments()
    y = OP(*positional, **keywords)
    gradients = torch.autograd.grad(y, list(wide.inputs().values()), layer.grad_y.double())
    return y.detach(), dict(zip(wide.inputs(), gradients, strict=True))


@pytest.mark.parametrize("kind", [*SHAPES, "clamped"])
def test_it_is_the_ops_answer(kind: str) -> None:
    y, gradients = in_float64(kind)
    layer = small(kind)
    right = truth(layer, backward=True)
    found = distances(right, y, gradients)
    assert {name for name in found if not name.startswith("a row")} == {"y", *("d_" + n for n in layer.inputs())}
    assert max(found.values()) < 1e-5, found
    assert wrong(found) is None
    forward = truth(layer, backward=False)
    assert torch.equal(forward.y, right.y) and not forward.gradients


def _row(tensor: Tensor) -> Tensor:
    tensor[7] = tensor[8]
    return tensor


def _nan(tensor: Tensor) -> Tensor:
    tensor[(0,) * tensor.dim()] = torch.nan
    return tensor


def _swap(tensor: Tensor) -> Tensor:
    return tensor.flip(0)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one row": _row,
    "a NaN": _nan,
    "swapped": _swap,
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        (where, fault)
        for where in ("y", *INPUTS)
        for fault in FAULTS
        if fault != "one row" or where in ("y", "x", "weights")  # a row means a token's
    ],
)
def test_a_fault_is_found(where: str, fault: str) -> None:
    kind = "shared" if where.startswith("shared") else "clamped"
    y, gradients = in_float64(kind)
    right = truth(small(kind), backward=True)
    if where == "y":
        y = FAULTS[fault](y.clone())
    else:
        gradients[where] = FAULTS[fault](gradients[where].clone())
    reason = wrong(distances(right, y, gradients))
    assert reason is not None and where in reason and "is off by" in reason


def test_a_wrong_row_among_many_is_found() -> None:
    right = torch.randn(100_000, 8)
    got = right.clone()
    got[777] *= 1.1
    found = distances(replace(truth(small(), False), y=right), got, {})
    assert found["y"] < 1e-2 < 3e-2 < found["a row of y"]
    assert "a row of y" in (wrong(found) or "")
