"""Custom ops that the pass reads as an ATen call: values and gradients are those of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mokfx.passes.custom_ops import MEANINGS, in_aten


def scatter_add_arguments() -> tuple[Any, ...]:
    pytest.importorskip("torchtitan.ops.scatter_add")
    index = torch.randint(0, 5, (12, 1)).expand(-1, 3)
    return torch.randn(5, 3, dtype=torch.float64), index, torch.randn(12, 3, dtype=torch.float64)


def grouped_mm_arguments() -> tuple[Any, ...]:
    pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)
    return torch.randn(12, 8), torch.randn(3, 8, 4), ends


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "torchtitan::deterministic_scatter_add": scatter_add_arguments,
    "transformers::grouped_mm_fallback": grouped_mm_arguments,
}


def test_each_custom_op_has_a_comparison() -> None:
    assert set(ARGUMENTS) == set(MEANINGS)


@pytest.mark.parametrize("name", MEANINGS)
def test_a_custom_op_gives_what_its_aten_call_gives(name: str) -> None:
    torch.manual_seed(0)
    given = ARGUMENTS[name]()
    namespace, op = name.split("::")
    custom = getattr(getattr(torch.ops, namespace), op).default
    target, arguments, kwargs = in_aten(custom, given, {})
    assert target.namespace == "aten"

    def run(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> list[Tensor]:
        """The output, and the gradient of each float argument."""
        floats = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
        inputs = {id(a): a.clone().requires_grad_() for a in floats}
        out = function(*(inputs.get(id(a), a) for a in arguments), **kwargs)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        grads = [inputs[id(a)].grad for a in floats]
        return [out.detach(), *(g for g in grads if g is not None)]

    expected = run(target, tuple(arguments))
    got = run(custom, given)
    assert len(got) == len(expected) > 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
