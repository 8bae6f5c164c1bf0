"""The backward kernel on an H100 or H200: each gradient right for every routing and layout, same bits every time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from tests.gpu.backward_case import Problem, check, errors, problem, run, saved
from tests.gpu.moe_case import ROUTINGS, Case, make, poison

pytestmark = pytest.mark.gpu

GATED: dict[str, list[float]] = {
    "swiglu": [],
    "geglu": [],
    "geglu_tanh": [],
    "reglu": [],
    "clamped_swiglu": [1.702, 1.5],
    "limited_swiglu": [1.5],
}
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(torch.randint(2**31, ()).item())
    torch.backends.cuda.matmul.allow_tf32 = False


def bias(*sizes: int, experts: int = 8) -> list[Tensor]:
    return [torch.randn(experts, size, device="cuda").bfloat16() for size in sizes]


def fused(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    if layout == "interleaved":
        return torch.stack([gate, up], -1).flatten(-2)
    return torch.cat([gate, up] if layout == "gate_up" else [up, gate], -1)


@pytest.mark.parametrize("order", ["kk", "kn", "nk", "nn"])
@pytest.mark.parametrize("tokens", [100, 1000])
def test_small(tokens: int, order: str) -> None:
    poison()
    check(problem(make(tokens, 256, 192, 8, 2, order=order)))


@pytest.mark.parametrize("order", ["kk", "nn"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_few_tokens(tokens: int, order: str) -> None:
    """A few numbers have no stable norm of their errors, so 40 layers' are taken together."""
    total: dict[str, list[float]] = {}
    for _ in range(40):
        given = problem(make(tokens, 256, 192, 8, 2, order=order))
        for name, pair in errors(given, run(given), torch.float64).items():
            sums = total.setdefault(name, [0.0, 0.0])
            for i, value in enumerate(pair):
                sums[i] += math.log(value + 1e-12) / 40
    for name, (ours, theirs) in total.items():
        assert ours <= theirs + math.log(1.5), (name, math.exp(ours), math.exp(theirs))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("order", ["kk", "nn"])
def test_routings(routing: str, order: str) -> None:
    poison()
    check(problem(make(3000, 512, 384, 32, 4, routing, order)))


@pytest.mark.parametrize(
    ("width", "inner", "experts", "choices"),
    [(64, 64, 1, 1), (2880, 2880, 8, 4), (2048, 768, 512, 10), (1024, 1408, 64, 32), (320, 64, 3, 3)],
)
def test_shapes(width: int, inner: int, experts: int, choices: int) -> None:
    poison()
    check(problem(make(600, width, inner, experts, choices)))


def test_experts_without_rows_get_zeros() -> None:
    case = make(500, 256, 192, 8, 2)
    case.ids[:] = torch.where(case.ids == 3, -1, case.ids)
    poison()
    d_x, d_weights, *weights = run(problem(case))
    assert all(not weight[3].any() and weight[2].any() for weight in weights)
    assert not d_weights[case.ids == -1].any() and d_x.isfinite().all()


@pytest.mark.parametrize("tokens", [0, 50])
def test_nothing_to_do(tokens: int) -> None:
    case = make(tokens, 256, 128, 8, 2)
    case.ids[:] = -1
    poison()
    for gradient in run(problem(case)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weight_and_id_types(dtype: torch.dtype) -> None:
    case = make(300, 256, 128, 8, 2)
    case = Case(case.x, case.ids.int(), case.weights.to(dtype), case.gate, case.up, case.down)
    assert run(problem(case))[1].dtype == dtype
    check(problem(case))


@pytest.mark.parametrize("layout", ["apart", "listed", "gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("order", ["kk", "nn"])
def test_activations_layouts_and_biases(name: str, layout: str, order: str) -> None:
    case = make(500, 320, 192, 8, 2, order=order)
    gate, up, down = bias(192, 192, 320)
    changes: dict[str, object] = {"activation": name, "activation_args": GATED[name], "b_down": [down]}
    if layout == "apart":
        changes |= {"b_gate": [gate], "b_up": [up], "weight_on": "hidden"}
    elif layout == "listed":
        lists = [[w[e].clone() for e in range(8)] for w in (case.gate, case.up, case.down)]  # strides are kept
        changes |= dict(zip(("w_gate", "w_up", "w_down"), lists, strict=True))
        changes |= {"b_gate": list(gate), "b_up": list(up), "b_down": list(down)}
    else:
        both = fused(case.gate, case.up, layout)
        if order == "kk":
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
        changes |= {"w_gate": [both], "w_up": [], "b_gate": [fused(gate, up, layout)], "gate_up": layout}
    given = problem(case, **changes)
    poison()
    check(given)
    for one, gradient in zip(given.call.tensors()[3:], run(given)[2:], strict=True):
        assert (one.shape, one.dtype) == (gradient.shape, gradient.dtype)
        assert one.stride() == gradient.stride(), "as the weight lies in memory"


@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("order", ["kk", "nn"])
def test_activations_without_a_gate(name: str, order: str) -> None:
    (up,) = bias(192)
    poison()
    check(problem(make(500, 320, 192, 8, 2, order=order), w_gate=[], activation=name, b_up=[up]))


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_same_bits_every_time(routing: str) -> None:
    given = problem(make(8192, 2048, 768, 128, 8, routing))
    kept = saved(given.call)
    first = run(given, kept)
    for _ in range(20):
        poison(0.5)
        assert all(torch.equal(a, b) for a, b in zip(run(given, kept), first, strict=True))


def test_graph_replay_with_new_routing_and_no_sync() -> None:
    given = problem(make(1000, 512, 256, 16, 4))
    kept = saved(given.call)
    run(given, kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(given, kept)
    for routing in ("zipf", "one_expert", "balanced"):
        new = problem(make(1000, 512, 256, 16, 4, routing))
        given.call.topk_ids.copy_(new.call.topk_ids), given.grad_y.copy_(new.grad_y)
        kept.copy_(saved(Problem(new.grad_y, given.call).call))
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        eager = run(given, kept)
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "choices"),
    [(8192, 2048, 768, 128, 8), (8192, 2048, 1024, 64, 8), (8192, 4096, 14336, 8, 2), (4096, 7168, 2048, 32, 8)],
    ids=["qwen3-30b", "olmoe", "mixtral", "dsv3/32e"],
)
def test_models(tokens: int, width: int, inner: int, experts: int, choices: int) -> None:
    poison()
    check(problem(make(tokens, width, inner, experts, choices)))
