"""Real ranks: exchanged layers become one call on each, equal the oracle, and give the bits of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mokfx.backend

from ..ranks import run_ranks
from ..spellings import dispatch
from ..spellings.catalogue import all_spellings
from ..spellings.layer import MoE, build
from ..spellings.oracle import exact
from ..spellings.router import Routed, Router
from ..spellings.spelling import Sizes, Spelling
from ..spellings.strategies import faulty_spellings, sample
from .composed import assert_graph_unchanged_in_meaning, assert_one_call, dtype_of
from .support import FLAGS, Recording, compiled

assert mokfx.backend

EXCHANGED = [s for s in all_spellings() if s.exchange and not s.needs_substitution]
CHUNK = 20


def loss_of(layer: MoE, result: Any, first: int) -> Tensor:
    """A sum in which every element counts differently, by its place among the tokens of all ranks."""
    y, *extras = result if isinstance(result, tuple) else (result,)
    flat = y.reshape(-1, y.shape[-1]).double()
    factors = torch.linspace(-1, 2, 64 * y.shape[-1], dtype=torch.float64).view(64, -1)
    loss = (flat * factors[first : first + flat.shape[0]]).sum()
    for extra in extras:
        if extra.is_floating_point() and layer.spelling.outputs == "y_logits":
            loss = loss + (extra.double() * 0.5).square().sum()
    return loss


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def y_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def check_one(spelling: Spelling, tokens: list[int]) -> None:
    """One spelling on this rank. Every rank knows all ranks' layers and inputs, and so the answer."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layers = [build(spelling, Sizes(), group, dtype_of(spelling), rank=r) for r in range(ranks)]
    # A capacity counts for all ranks, so they need as many tokens.
    counts = [tokens[0] if spelling.whole else tokens[r] for r in range(ranks)]
    inputs = [m.example(counts[r], seed=r) for r, m in enumerate(layers)]
    layer, starts = layers[rank], [sum(counts[:r]) for r in range(ranks)]
    options = {"mok.compiler": "eager", "mok.on_miss": "raise"}
    names = [name for name, _ in layer.named_parameters()]
    leaves = [inputs[rank][0], *layer.parameters()]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**FLAGS):
        record = Recording()
        torch.compile(layer, backend=record, fullgraph=True)(*inputs[rank])
        assert_one_call(record)
        torch._dynamo.reset()
        result = torch.compile(layer, backend="mok", fullgraph=True, options=options)(*inputs[rank])
    got = gradients(loss_of(layer, result, starts[rank]), leaves)

    answers = [exact(layers, r, *inputs[r]) for r in range(ranks)]
    total = torch.zeros((), dtype=torch.float64)
    for r, (y, routed) in enumerate(answers):
        extra = (routed.logits,) if spelling.outputs == "y_logits" else ()
        total = total + loss_of(layer, (y, *extra), starts[r])
    tolerance = 5e-2 if spelling.bf16_only else 1e-10
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(y_of(result).double(), answers[rank][0], **close)
    for name, g, wanted in zip(["x", *names], got, gradients(total, leaves), strict=True):
        torch.testing.assert_close(g, wanted, **close, msg=lambda text, n=name: f"gradient of {n}: {text}")


def steady(router: Router, x: Tensor, token_ids: Tensor) -> Routed:
    """A router without a product over tokens: the bits of one depend on how many there are."""
    ids = (token_ids.unsqueeze(1) * 7 + torch.arange(router.top_k) * 3) % router.experts
    logits = (x.detach().unsqueeze(1) * router.weight).sum(-1)
    weights = logits.sigmoid().gather(1, ids)
    return Routed(ids, weights, weights)


BITS = [
    replace(s, router="softmax_topk", outputs="y")
    for s in EXCHANGED
    if not (s.whole or s.bf16_only or s.batched or s.top_k(Sizes()) == 1)
    and s.counts not in dispatch.COUNTS_OF_DISTINCT
]
FIELDS = ("act", "fused", "up_first", "storage", "bias", "listed", "shared", "weight_on")


def check_bits(spelling: Spelling, tokens: list[int]) -> None:
    """Ranks and one rank with all their tokens, both through the rewritten graph: the same bits."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    alone = replace(Spelling(), **{field: getattr(spelling, field) for field in FIELDS})
    layer, one = build(spelling, Sizes(), group), build(alone, Sizes())
    layer.router.spelling = one.router.spelling = steady
    inputs = [layer.example(tokens[r], seed=r) for r in range(ranks)]
    first = sum(tokens[:rank])
    x = torch.cat([x.detach() for x, _ in inputs]).requires_grad_()
    token_ids = torch.cat([ids for _, ids in inputs])
    runs = []
    for m, given, start in ((layer, inputs[rank], first), (one, (x, token_ids), 0)):
        with compiled(m) as (function, record):
            y = function(*given)
        assert_one_call(record)
        names, leaves = zip(*m.named_parameters(), strict=True)
        found = gradients(loss_of(m, y, start), [given[0], *leaves])
        runs.append((y, dict(zip(["x", *names], found, strict=True))))
    (y, got), (whole_y, whole) = runs
    mine, exactly = slice(first, first + tokens[rank]), {"rtol": 0, "atol": 0}
    torch.testing.assert_close(y, whole_y[mine], **exactly)
    torch.testing.assert_close(got["x"], whole["x"][mine], **exactly)
    for name, gradient in got.items():
        if name.startswith("ffn."):
            wanted = whole[own_name(name, layer)]
            wanted = wanted if spelling.listed else wanted[rank * layer.ffn.count :][: layer.ffn.count]
            torch.testing.assert_close(gradient, wanted, **exactly, msg=lambda t, n=name: f"bits of {n}: {t}")
    summed = got["router.weight"].clone()
    dist.all_reduce(summed)
    torch.testing.assert_close(summed, whole["router.weight"], rtol=1e-12, atol=1e-12)


def own_name(name: str, layer: MoE) -> str:
    """What a parameter of this rank is called in the layer of one rank: listed experts are numbered."""
    parts = name.split(".")
    number = [i for i, part in enumerate(parts) if part.isdigit()]
    if number:
        parts[number[0]] = str(int(parts[number[0]]) + layer.rank * layer.ffn.count)
    return ".".join(parts)


def check_all(rank: int, spellings: list[Spelling], tokens: list[int], bits: bool = False) -> int:
    for spelling in spellings:
        try:
            (check_bits if bits else check_one)(spelling, tokens)
        except BaseException as error:
            error.add_note(f"{spelling.id}, tokens {tokens}")
            raise
    return len(spellings)


@pytest.mark.parametrize("start", range(0, len(EXCHANGED), CHUNK))
def test_two_ranks(start: int) -> None:
    some = EXCHANGED[start : start + CHUNK]
    assert run_ranks(2, check_all, some, [16, 10], timeout=280) == [len(some)] * 2


def test_four_ranks() -> None:
    some = EXCHANGED[::3]
    assert run_ranks(4, check_all, some, [6, 4, 8, 2], timeout=400) == [len(some)] * 4


@pytest.mark.parametrize("tokens", [[16, 10], [1, 7], [9, 0], [6, 4, 0, 8]], ids=str)
def test_the_bits_of_one_rank(tokens: list[int]) -> None:
    some = BITS[:: 2 if len(tokens) == 2 else 4]
    assert len(some) > 5
    assert run_ranks(len(tokens), check_all, some, tokens, True, timeout=400) == [len(some)] * len(tokens)


@pytest.mark.parametrize("tokens", [[12, 0], [0, 12], [1, 7], [1, 1], [1, 0]], ids=str)
def test_few_tokens(tokens: list[int]) -> None:
    """A rank without tokens, or with one, takes part in every exchange: nobody waits for ever."""
    some = [
        s
        for s in EXCHANGED[::5]
        if not s.whole
        and not s.batched
        and not s.bf16_only
        and s.outputs != "y_aux"  # the mean of nothing is nan
    ]
    assert len(some) > 5
    assert run_ranks(2, check_all, some, tokens, timeout=200) == [len(some)] * 2


def check_faults(rank: int, count: int) -> int:
    """Layers with a fault that an op can express: whatever matches on these ranks is equal there."""
    group, done = dist.group.WORLD, 0
    for spelling, fault in sample(faulty_spellings(exchanged=True), count):
        if fault.expectation != "equal" or spelling.bf16_only:
            continue

        def make(spelling: Spelling = spelling, fault: Any = fault) -> MoE:
            layer = build(spelling, Sizes(), group)
            fault.plant(layer)
            return layer

        try:
            assert_graph_unchanged_in_meaning(make, truth="aot_eager")
        except BaseException as error:
            error.add_note(f"{fault.name}: {spelling.id}")
            raise
        done += 1
    return done


def test_faults_that_match_are_equal() -> None:
    first, second = run_ranks(2, check_faults, 150, timeout=300)
    assert first == second
    assert first > 15
