"""Under autocast the op computes in the autocast dtype, and gradients arrive in the dtype of their leaves."""

from __future__ import annotations

import pytest
import torch

from mokfx.ops import OP
from tests.ops.caches import no_graph_caches
from tests.ops.cases import Case, build

FULL = Case(dtype=torch.float32, biases=True, shared="apart+sigmoid", tokens=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_equals_the_same_call_on_cast_tensors(dtype: torch.dtype) -> None:
    inputs = build(FULL).require_grad()
    with torch.autocast("cpu", dtype):
        y = OP(*inputs.args, **inputs.settings)
    cast = build(FULL).map(lambda t: t.to(dtype) if t.is_floating_point() else t)
    cast.args[2] = build(FULL).args[2]  # topk_weights stay float32
    cast = cast.require_grad()
    expected = OP(*cast.args, **cast.settings)
    assert y.dtype == dtype and torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for leaf, other in zip(inputs.leaves(), cast.leaves(), strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, other.grad.float())


def test_mixed_inputs_meet_in_the_autocast_dtype() -> None:
    inputs = build(FULL)
    inputs.args[0] = inputs.args[0].half()
    inputs.args[3] = [t.bfloat16() for t in inputs.args[3]]
    with torch.autocast("cpu", torch.bfloat16):
        assert OP(*inputs.args, **inputs.settings).dtype == torch.bfloat16


def test_float64_stays() -> None:
    inputs = build(Case())
    with torch.autocast("cpu", torch.bfloat16):
        y = OP(*inputs.args, **inputs.settings)
    assert torch.equal(y, OP(*inputs.args, **inputs.settings))


def test_out_dtype_stays_as_asked() -> None:
    inputs = build(Case(dtype=torch.float32, out_dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert OP(*inputs.args, **inputs.settings).dtype == torch.float32


def test_disabled_autocast_changes_nothing() -> None:
    inputs = build(FULL)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert OP(*inputs.args, **inputs.settings).dtype == torch.float32


def test_backward_inside_the_autocast_region() -> None:
    inside, outside = build(FULL).require_grad(), build(FULL).require_grad()
    with torch.autocast("cpu", torch.bfloat16):
        OP(*inside.args, **inside.settings).sum().backward()
        y = OP(*outside.args, **outside.settings)
    y.sum().backward()
    for a, b in zip(inside.leaves(), outside.leaves(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@no_graph_caches()
def test_compiled(backend: str) -> None:
    eager, compiled = build(FULL).require_grad(), build(FULL).require_grad()

    @torch.compile(backend=backend, fullgraph=True)
    def call() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return OP(*compiled.args, **compiled.settings)

    with torch.autocast("cpu", torch.bfloat16):
        expected = OP(*eager.args, **eager.settings)
    y = call()
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for a, b in zip(eager.leaves(), compiled.leaves(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
