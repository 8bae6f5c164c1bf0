"""Several ranks, as blocks of one launch: the same bits as one rank with all tokens, whatever goes where."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from mokfx.kernels import provider
from mokfx.kernels.forward import forward
from mokfx.kernels.virtual import VirtualGroup
from mokfx.ops import Call
from tests.gpu.moe_case import poison
from tests.ops.cases import Case, build

pytestmark = pytest.mark.gpu

WIDTH, MOST, CHOICES = 256, 700, 4
BASE = Case(
    hidden=WIDTH, inner=192, experts=16, choices=CHOICES, shared_inner=128, dtype=torch.bfloat16, transposed=True
)
CASES = {
    "plain": BASE,
    "dropped": replace(BASE, dropped=0.3),
    "one expert": replace(BASE, choices=CHOICES, only=(3, 4, 5, 6)),
    "shared": replace(BASE, shared="fused+sigmoid"),
    "biases": replace(BASE, activation="clamped_swiglu", biases=True, gate_up="interleaved", transposed=False),
    "weight on the input": replace(BASE, weight_on="input", activation="relu", biases=True),
    "weight on the hidden": replace(BASE, weight_on="hidden", shared="apart"),
}


def whole(case: Case, tokens: int) -> Call:
    inputs = build(replace(case, tokens=tokens), seed=random.randrange(2**31)).map(lambda tensor: tensor.cuda())
    return Call(*inputs.args, **inputs.settings)


def part(call: Call, rank: int, ranks: int, begin: int, end: int) -> Call:
    """The call of one rank: its tokens, its experts."""
    experts = slice(rank * call.num_experts // ranks, (rank + 1) * call.num_experts // ranks)
    own: dict[str, Any] = {name: getattr(call, name)[begin:end] for name in ("x", "topk_ids", "topk_weights")}
    for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
        own[name] = [stack[experts] for stack in getattr(call, name) or []]
    return replace(call, **own)


def alone(call: Call) -> Tensor:
    x, weights, layer = provider.arguments(call)
    return forward(x, call.topk_ids, weights, layer, timeout=5.0)


def together(group: VirtualGroup, call: Call, tokens: list[int], **options: Any) -> Tensor:
    ends = torch.tensor(tokens).cumsum(0).tolist()
    begins = [0, *ends]
    calls = [part(call, rank, len(tokens), begins[rank], end) for rank, end in enumerate(ends)]
    xs, weights, layers = zip(*(provider.arguments(one) for one in calls), strict=True)
    return torch.cat(group.forward(xs, [one.topk_ids.contiguous() for one in calls], weights, layers, **options))


def some_tokens(ranks: int) -> list[int]:
    """A number for each rank, one of them 0 and one of them all that there is room for."""
    tokens = [random.choice([1, 7, 64, 100, 333]) for _ in range(ranks)]
    tokens[random.randrange(ranks)] = 0
    tokens[random.randrange(ranks)] = MOST
    return tokens


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_same_bits_as_one_rank(ranks: int, name: str) -> None:
    group = VirtualGroup(ranks, MOST, CHOICES, WIDTH)
    for _ in range(4):  # with the memory that the call before has left
        tokens = some_tokens(ranks)
        call = whole(CASES[name], sum(tokens))
        poison(0.5)
        assert torch.equal(together(group, call, tokens), alone(call))


@pytest.mark.parametrize("ranks", [2, 8])
def test_same_bits_for_any_number_of_blocks(ranks: int) -> None:
    group = VirtualGroup(ranks, MOST, CHOICES, WIDTH)
    tokens = [MOST] * ranks
    call = whole(BASE, sum(tokens))
    first = together(group, call, tokens)
    for blocks in (1, 5, 12):
        assert torch.equal(together(group, call, tokens, blocks=blocks), first)


def test_all_to_one_rank_and_nothing_at_all() -> None:
    group = VirtualGroup(4, MOST, CHOICES, WIDTH)
    for ids in ([0, 1, 2, 3], [12, 13, 14, 15], [-1] * 4):
        tokens = some_tokens(4)
        call = whole(BASE, sum(tokens))
        call = replace(call, topk_ids=torch.tensor(ids, device="cuda").expand(sum(tokens), 4).contiguous())
        assert torch.equal(together(group, call, tokens), alone(call))


@pytest.mark.timeout(120)
def test_a_thousand_calls_of_different_layers_share_one_memory() -> None:
    random.seed(torch.initial_seed() % 2**32)
    group = VirtualGroup(4, MOST, CHOICES, WIDTH)
    made = []
    for name in CASES:
        tokens = some_tokens(4)
        call = whole(CASES[name], sum(tokens))
        made.append((call, tokens, alone(call)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        call, tokens, expected = random.choice(made)
        wrong += (together(group, call, tokens) != expected).any()
    assert int(wrong) == 0


def test_an_id_out_of_range_is_found_by_its_rank() -> None:
    """Only that it is a fault; in a process of its own, since the fault takes the CUDA context with it."""
    import subprocess
    import sys

    program = """
import torch
from dataclasses import replace
from mokfx.kernels.faults import fault
from tests.gpu.test_ranks import *
group, tokens = VirtualGroup(2, MOST, CHOICES, WIDTH), [50, 50]
call = whole(BASE, 100)
call.topk_ids[70, 1] = 16
try:
    together(group, call, tokens)
    torch.cuda.synchronize()
except Exception:
    print(fault())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert "an expert id out of range: 16" in ran.stdout, ran.stdout + ran.stderr
