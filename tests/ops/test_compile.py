"""The bare op under torch.compile, and torch's own checks of its registration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mokfx.ops import OP
from tests.ops.caches import no_graph_caches
from tests.ops.cases import Case, Inputs, build

FORWARD = torch.ops.mok.moe_forward.default
BACKWARD = torch.ops.mok.moe_backward.default

SOME = [
    Case(),
    Case(dtype=torch.bfloat16, weights_dtype=torch.float32, transposed=True, shared="fused"),
    Case(listed=True, transposed=True, biases=True, gate_up="interleaved", dropped=0.3),
    Case(activation="relu_squared", capacity=2, weight_on="hidden", out_dtype=torch.float32),
    Case(activation="clamped_swiglu", shared="apart+sigmoid", weight_on="input", ids_dtype=torch.int32),
    Case(tokens=0, biases=True),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with no_graph_caches():
        yield


def _backward_arguments(inputs: Inputs, case: Case) -> tuple[Any, ...]:
    return (torch.randn(inputs.args[0].shape).to(case.out_dtype or case.dtype), *inputs.args)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_opcheck_of_moe(case: Case) -> None:
    inputs = build(case).require_grad()
    results = torch.library.opcheck(OP, tuple(inputs.args), inputs.settings)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("case", SOME[:2], ids=str)
def test_opcheck_of_moe_forward(case: Case) -> None:
    inputs = build(case)
    results = torch.library.opcheck(FORWARD, tuple(inputs.args), inputs.settings)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    assert torch.equal(FORWARD(*inputs.args, **inputs.settings)[0], OP(*inputs.args, **inputs.settings))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_opcheck_of_moe_backward(case: Case) -> None:
    inputs = build(case)
    results = torch.library.opcheck(BACKWARD, _backward_arguments(inputs, case), inputs.settings)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_fake_of_moe_backward_has_the_strides_of_the_real_one(case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = build(case)
    args = _backward_arguments(inputs, case)
    real = BACKWARD(*args, **inputs.settings)
    mode = FakeTensorMode()
    fakes = Inputs(list(args), inputs.settings).map(mode.from_tensor)
    with mode:
        fake = BACKWARD(*fakes.args, **fakes.settings)
    assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]
    for gradient, leaf in zip(real[2:], inputs.leaves()[2:], strict=True):
        assert gradient.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_token_counts_may_change_without_recompiling(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    weights = build(Case(shared="apart", transposed=True)).require_grad()

    def layer(x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        return OP(x.sin(), ids, probabilities * 2, *weights.args[3:], **weights.settings).cos()

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5, 2, 33, 64, 7, 100):
        fresh = build(Case(tokens=tokens), seed=tokens).require_grad()
        leaves = [fresh.args[0], fresh.args[2], *weights.leaves()[2:]]
        expected = layer(*fresh.args[:3])
        wanted = torch.autograd.grad(expected.sum(), leaves)
        y = compiled(*fresh.args[:3])
        found = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_token_count_that_depends_on_data(backend: str) -> None:
    weights = build(Case())

    @torch.compile(backend=backend, fullgraph=True)
    def layer(x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        chosen = torch.nonzero(x[:, 0] > 0)[:, 0]
        return OP(x[chosen], ids[chosen], probabilities[chosen], *weights.args[3:], **weights.settings)

    for tokens in (20, 9):
        x, ids, probabilities = build(Case(tokens=tokens)).args[:3]
        chosen = x[:, 0] > 0
        expected = OP(x[chosen], ids[chosen], probabilities[chosen], *weights.args[3:], **weights.settings)
        torch.testing.assert_close(layer(x, ids, probabilities), expected, rtol=1e-12, atol=1e-12)
    none = layer(x.abs().neg(), ids, probabilities)
    assert none.shape == (0, 8)


def test_a_capacity_that_depends_on_the_token_count() -> None:
    weights = build(Case())
    settings = {k: v for k, v in weights.settings.items() if k != "capacity"}

    def layer(x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        return OP(x, ids, probabilities, *weights.args[3:], capacity=x.shape[0] // 4, **settings)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (8, 21, 40):
        fresh = build(Case(tokens=tokens), seed=tokens).require_grad()
        y, expected = compiled(*fresh.args[:3]), layer(*fresh.args[:3])
        assert torch.equal(y, expected)
        (found,), (wanted,) = (torch.autograd.grad(out.sum(), fresh.args[0]) for out in (y, expected))
        assert torch.equal(found, wanted)


def test_a_wrong_argument_is_refused_while_compiling() -> None:
    inputs = build(Case())
    inputs.settings["num_experts"] = 5
    compiled = torch.compile(lambda: OP(*inputs.args, **inputs.settings), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w_down is one tensor of shape \[4, 6, 8\]"):
        compiled()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("tokens", [5, 0])
def test_no_call_is_optimised_away(backend: str, tokens: int) -> None:
    """Other ranks wait for it. With T = 0 the result is known at compile time, and nothing reads it."""
    inputs = build(Case(tokens=tokens))
    x = inputs.args[0].requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return OP(x.sin(), *inputs.args[1:], **inputs.settings).cos()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    with torch.profiler.profile() as profile:
        compiled(x).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("mok::")}
    assert calls == {"mok::moe_forward": 1, "mok::moe_backward": 1}


def test_functional_transforms_of_the_outputs_still_trace() -> None:
    """make_fx sees one op forward and one backward."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = build(Case())

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = OP(x, *inputs.args[1:], **inputs.settings)
        return torch.autograd.grad(y.sum(), x)[0]

    targets = [node.target for node in make_fx(step)(inputs.args[0]).graph.nodes]
    assert targets.count(FORWARD) == 1 and OP not in targets and targets.count(BACKWARD) == 1
