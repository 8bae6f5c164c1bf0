"""The forward kernel on an H100 or H200: right for every routing and layout, same bits each time, no sync."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from mokfx.kernels import forward as hopper
from mokfx.kernels.activation import activation, biases
from mokfx.kernels.weights import Matrices, gate_and_up, matrices
from tests.gpu.moe_case import ROUTINGS, Act, Case, error, make, poison, reference, swiglu

pytestmark = pytest.mark.gpu


def run(case: Case) -> torch.Tensor:
    found = [matrices([weight]) for weight in (case.gate, case.up, case.down)]
    gate, up, down = (weights for weights in found if isinstance(weights, Matrices))
    return hopper.forward(case.x, case.ids, case.weights, gate, up, down, timeout=5.0)


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


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_fused_gate_and_up(layout: str, listed: bool) -> None:
    case = make(300, 256, 128, 8, 2)
    if layout == "interleaved":
        fused = torch.stack([case.gate, case.up], -1).flatten(-2)
    else:
        fused = torch.cat([case.gate, case.up] if layout == "gate_up" else [case.up, case.gate], -1)
    fused = fused.transpose(1, 2).contiguous().transpose(1, 2)
    both, down = gate_and_up(list(fused) if listed else [fused], [], layout), matrices([case.down])
    assert isinstance(both, tuple) and isinstance(down, Matrices)
    assert torch.equal(hopper.forward(case.x, case.ids, case.weights, *both, down), run(case))


@pytest.mark.parametrize("order", ["kk", "kn", "nk", "nn"])
def test_listed_weights(order: str) -> None:
    case = make(1000, 256, 192, 24, 4, order=order)
    lists = [[w[e].clone() for e in range(24)] for w in (case.gate, case.up, case.down)]  # strides are kept
    gate, up, down = (weights for weights in map(matrices, lists) if isinstance(weights, Matrices))
    assert gate.listed and len(set(gate.addresses)) == 24
    assert torch.equal(hopper.forward(case.x, case.ids, case.weights, gate, up, down), run(case))


ACTS: dict[str, tuple[list[float], Act]] = {
    "swiglu": ([], swiglu),
    "geglu_tanh": ([], lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "clamped_swiglu": (
        [1.702, 1.5],
        lambda gate, up: gate.clamp(max=1.5) * torch.sigmoid(1.702 * gate.clamp(max=1.5)) * (up.clamp(-1.5, 1.5) + 1),
    ),
}


@pytest.mark.parametrize("layout", ["none", "apart", "interleaved"])
@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("order", ["kk", "nn"])
def test_activations_and_biases(name: str, layout: str, order: str) -> None:
    case = make(500, 320, 192, 8, 2, order=order)
    arguments, plain = ACTS[name]
    act = activation(name, arguments)
    assert act is not None
    gate, up, down = (torch.randn(8, n, device="cuda").bfloat16() for n in (192, 192, 320))
    if layout == "none":
        bias = biases(None, None, None, "apart")
    elif layout == "apart":
        bias = biases([gate], list(up), [down], "apart")
    else:
        bias = biases([torch.stack([gate, up], -1).flatten(1)], None, [down], layout)
    poison()
    found = [matrices([weight]) for weight in (case.gate, case.up, case.down)]
    weights = [one for one in found if isinstance(one, Matrices)]
    y = hopper.forward(case.x, case.ids, case.weights, *weights, act=act, bias=bias, timeout=5.0)
    truth = reference(case, torch.float64, plain, bias)
    ours, theirs = error(y, truth), error(reference(case, torch.bfloat16, plain, bias), truth)
    assert ours <= 1.5 * theirs, f"relative error {ours:.2e}, of an unfused bf16 computation {theirs:.2e}"


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
