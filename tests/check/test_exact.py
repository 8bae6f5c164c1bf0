"""A program in float64, whatever it asks for, with the choices of another run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mokfx.check.exact import Recording, grouped_product, in_float64

THIRD = torch.tensor([1 / 3, 2 / 3, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "narrow",
    [
        lambda x: x.to(torch.bfloat16) * 3,
        lambda x: x.float() * 3,
        lambda x: x.half().type(torch.bfloat16) * 3,
        lambda x: torch.zeros(3, dtype=torch.bfloat16).add_(x) * 3,
        lambda x: torch.tensor([0.0, 0.0, 0.0]) + x * 3,
        lambda x: x.unsqueeze(0).expand(3, 3).mean(0, dtype=torch.float32) * 3,
        lambda x: torch.empty_like(x, dtype=torch.float16).copy_(x) * 3,
    ],
)
def test_no_cast_rounds(narrow: object) -> None:
    with in_float64(Recording().choices):
        y = narrow(THIRD.clone())  # type: ignore[operator]
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, THIRD * 3, rtol=1e-15, atol=0)


def test_a_softmax_in_float_is_one_in_double_and_so_is_its_gradient() -> None:
    x = THIRD.clone().requires_grad_()
    with in_float64(Recording().choices):
        (grad,) = torch.autograd.grad(x.softmax(-1, dtype=torch.float32)[0], x)
    (right,) = torch.autograd.grad(x.softmax(-1)[0], x)
    assert grad.dtype == torch.float64
    torch.testing.assert_close(grad, right, rtol=1e-15, atol=0)


CHOICES = {
    "topk": lambda x: x.topk(1)[0] + x.topk(1)[1],
    "sort": lambda x: x.sort(-1, descending=True)[0][..., :1] + x.argsort(-1, descending=True)[..., :1],
    "max": lambda x: x.max(-1)[0] + x.max(-1, keepdim=True)[1],
    "argmax": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)) + x.argmax(-1, keepdim=True),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_near_tie_is_decided_as_it_was(choose: object) -> None:
    """In bfloat16 the first is larger by a rounding, in float64 the second."""
    narrow = torch.tensor([[1.0, 0.99]], dtype=torch.bfloat16)
    exact = torch.tensor([[1.0, 1.0000001]], dtype=torch.float64, requires_grad=True)
    with Recording() as recorded:
        first = choose(narrow)  # type: ignore[operator]
    with in_float64(recorded.choices):
        again = choose(exact)  # type: ignore[operator]
        (grad,) = torch.autograd.grad(again, exact)
    assert first.item() == again.item() == 1.0
    assert grad.tolist() == [[1.0, 0.0]]
    with in_float64(Recording().choices):
        assert choose(exact).item() > 1.5  # type: ignore[operator]


ENDS = torch.tensor([8, 8, 24], dtype=torch.int32)
FORMS = {
    "rows": ((24, 16), (3, 16, 8)),
    "inner": ((8, 24), (24, 16)),
    "columns": ((3, 8, 16), (16, 24)),
    "batch": ((3, 8, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_grouped_product_is_torchs(form: str) -> None:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(FORMS[form]))
    ends = None if form == "batch" else ENDS
    right = torch._grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(grouped_product(a, b, ends), right)


def test_a_grouped_product_has_gradients_in_float64() -> None:
    drawn = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))

    def grads(weight: Tensor) -> tuple[Tensor, ...]:
        rows = drawn.to(weight).requires_grad_()
        y = torch._grouped_mm(rows, weight, offs=ENDS)
        return torch.autograd.grad((y * y).sum(), (rows, weight))

    weight = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with in_float64(Recording().choices):
        wide = grads(weight.detach().double().requires_grad_())
    for found, right in zip(wide, grads(weight), strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), right, rtol=1e-4, atol=1e-4)
