"""The shared expert's gradients beside autograd's, in float64; they need no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mokfx.kernels.shared_gradients import shared_gradients

TOKENS, HIDDEN, INNER = 9, 24, 16


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_every_gradient_is_autograds(fused: bool, gated: bool, transposed: bool, tokens: int) -> None:
    def made(*shape: int) -> Tensor:
        weight = torch.randn(*shape, dtype=torch.float64) * shape[0] ** -0.5
        return (weight.t().contiguous().t() if transposed else weight).requires_grad_()

    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    first = made(HIDDEN, 2 * INNER if fused else INNER)
    up = None if fused else made(HIDDEN, INNER)
    down = made(INNER, HIDDEN)
    sigmoid = torch.randn(HIDDEN, 1, dtype=torch.float64, requires_grad=True) if gated else None
    gate_part, up_part = (first, up) if up is not None else first.chunk(2, 1)
    y = F.silu(x @ gate_part) * (x @ up_part) @ down
    if sigmoid is not None:
        y = y * torch.sigmoid(x @ sigmoid)
    grad_y = torch.randn_like(y)
    parameters = [one for one in (first, up, down, sigmoid) if one is not None]
    expected = torch.autograd.grad(y, [x, *parameters], grad_y)
    with torch.no_grad():
        found = shared_gradients(grad_y, x, first, up, down, sigmoid)
    for one, other in zip([found.x, *found.weights], expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)  # inside it is float32
    for gradient, parameter in zip(found.weights, parameters, strict=True):
        assert gradient.stride() == torch.empty_like(parameter).stride()
