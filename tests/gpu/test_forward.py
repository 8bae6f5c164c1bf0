"""The forward kernel on an H100 or H200: right for every routing and layout, same bits each time, no sync."""

from __future__ import annotations

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from mokfx.kernels import forward as hopper
from mokfx.kernels.layer import Layer
from mokfx.kernels.weights import FirstLayer, Matrices, first_layer, matrices
from tests.gpu.moe_case import ROUTINGS, Case, error, make, poison, reference

pytestmark = pytest.mark.gpu


def run(case: Case) -> torch.Tensor:
    first, down = first_layer([case.gate], [case.up], "apart"), matrices([case.down])
    assert isinstance(first, FirstLayer) and isinstance(down, Matrices)
    return hopper.forward(case.x, case.ids, case.weights, Layer(first, down), timeout=5.0)


def check(case: Case) -> None:
    poison()
    y = run(case)
    truth = reference(case, torch.float64 if case.x.numel() * case.gate.numel() < 2**36 else torch.float32)
    unfused = reference(case, torch.bfloat16)
    ours, theirs = error(y, truth), error(unfused, truth)
    assert ours <= 1.5 * theirs, f"relative error {ours:.2e}, of an unfused bf16 computation {theirs:.2e}"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(torch.randint(2**31, ()).item())
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("order", ["kk", "kn", "nk", "nn"])
@pytest.mark.parametrize("tokens", [1, 7, 100, 1000])
def test_small(tokens: int, order: str) -> None:
    check(make(tokens, 256, 192, 8, 2, order=order))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("order", ["kk", "nn"])
def test_routings(routing: str, order: str) -> None:
    check(make(3000, 512, 384, 32, 4, routing, order))


@pytest.mark.parametrize(
    ("width", "inner", "experts", "choices"),
    [(64, 64, 1, 1), (2880, 2880, 32, 4), (2048, 768, 512, 10), (1024, 1408, 64, 32), (320, 64, 3, 3)],
)
def test_shapes(width: int, inner: int, experts: int, choices: int) -> None:
    check(make(600, width, inner, experts, choices))


def test_nothing_to_do() -> None:
    case = make(0, 256, 128, 8, 2)
    assert run(case).shape == (0, 256)
    case = make(50, 256, 128, 8, 2)
    poison()
    assert torch.equal(run(dataclasses.replace(case, ids=torch.full_like(case.ids, -1))), torch.zeros_like(case.x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weight_and_id_types(dtype: torch.dtype) -> None:
    case = make(300, 256, 128, 8, 2)
    check(dataclasses.replace(case, weights=case.weights.to(dtype), ids=case.ids.int()))


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_same_bits_every_time(routing: str) -> None:
    case = make(8192, 2048, 768, 128, 8, routing)
    first = run(case)
    for _ in range(20):
        poison(0.5)
        assert torch.equal(run(case), first)


def test_a_token_does_not_depend_on_others() -> None:
    case = make(4096, 1024, 512, 16, 4)
    first = run(case)
    keep = torch.rand(4096, device="cuda") < 0.3
    other = make(4096, 1024, 512, 16, 4, "zipf")
    mixed = dataclasses.replace(
        case,
        x=torch.where(keep[:, None], case.x, other.x),
        ids=torch.where(keep[:, None], case.ids, other.ids),
        weights=torch.where(keep[:, None], case.weights, other.weights),
    )
    assert torch.equal(run(mixed)[keep], first[keep])
    assert torch.equal(
        run(dataclasses.replace(case, x=case.x[keep], ids=case.ids[keep], weights=case.weights[keep])),
        first[keep],
    )


def test_graph_replay_with_new_routing_and_no_sync() -> None:
    case = make(1000, 512, 256, 16, 4)
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(case)
    for routing in ("zipf", "one_expert", "balanced"):
        new = make(1000, 512, 256, 16, 4, routing)
        case.x.copy_(new.x), case.ids.copy_(new.ids)
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        eager = run(case)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(y, eager)


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "choices"),
    [
        (8192, 2048, 768, 128, 8),
        (8192, 2048, 1024, 64, 8),
        (8192, 4096, 14336, 8, 2),
        (4096, 7168, 2048, 32, 8),
    ],
    ids=["qwen3-30b", "olmoe", "mixtral", "dsv3/32e"],
)
def test_models(tokens: int, width: int, inner: int, experts: int, choices: int) -> None:
    check(make(tokens, width, inner, experts, choices))
