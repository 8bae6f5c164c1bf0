"""The corpus itself is right: every spelling in eager equals the dense oracle, outputs and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..ranks import run_ranks
from .capture import capture
from .catalogue import CHOICES, all_spellings
from .layer import MoE, build
from .oracle import exact
from .router import Routed
from .spelling import Sizes, Spelling
from .substitution import why

ALL = list(all_spellings())
ONE_RANK = [s for s in ALL if not s.exchange]
EXCHANGED = [s for s in ALL if s.exchange]
# gloo has the list form for equal sizes only
RUNNABLE = [s for s in EXCHANGED if s.exchange != "listed" or s.whole]


def dtype_of(s: Spelling) -> torch.dtype:
    return torch.float32 if s.bf16_only else torch.float64


def loss_of(y: Tensor, extra: Tensor | None) -> Tensor:
    """A sum in which every element counts differently."""
    factors = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    loss = (y.double() * factors).sum()
    if extra is not None and extra.is_floating_point():
        loss = loss + (extra.double() * 0.5).square().sum()
    return loss


def run(layer: Any, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    result = layer(x, token_ids)
    return result if isinstance(result, tuple) else (result, None)


def expected_extra(s: Spelling, routed: Routed, experts: int) -> Tensor | None:
    counts = torch.stack([(routed.ids == e).sum() for e in range(experts)])
    return {"y_logits": routed.logits, "y_aux": routed.aux, "y_ids": routed.ids, "y_counts": counts}.get(
        s.outputs
    )


def assert_close(name: str, got: Any, wanted: Any, dtype: torch.dtype) -> None:
    if got is None and wanted is None:
        return
    # An expert that nobody chose may be left out of eager's graph.
    got = torch.zeros_like(wanted) if got is None else got
    wanted = torch.zeros_like(got) if wanted is None else wanted
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def check(
    layers: list[MoE], rank: int, inputs: list[tuple[Tensor, Tensor]], run_layer: Any, grads: bool
) -> None:
    """`layers[rank]`, run in its group by `run_layer`, against the oracle that knows every rank's layer."""
    layer, s = layers[rank], layers[rank].spelling
    leaves = {"x": inputs[rank][0], **dict(layer.named_parameters())}
    y, extra = run(run_layer, *inputs[rank])
    answers = [exact(layers, r, *inputs[r]) for r in range(len(layers))]
    extras = [expected_extra(s, routed, layer.experts) for _, routed in answers]
    assert y.dtype == layer.dtype
    assert_close("y", y, answers[rank][0], layer.dtype)
    assert (extra is None) == (extras[rank] is None)
    assert_close("extra", extra, extras[rank], layer.dtype)
    if grads:
        got = torch.autograd.grad(loss_of(y, extra), list(leaves.values()), allow_unused=True)
        total = torch.stack([loss_of(a[0], more) for a, more in zip(answers, extras, strict=True)]).sum()
        wanted = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for name, g, w in zip(leaves, got, wanted, strict=True):
            assert_close(f"gradient of {name}", g, w, layer.dtype)


@pytest.mark.parametrize("spelling", ONE_RANK, ids=lambda s: s.id)
def test_one_rank_equals_oracle(spelling: Spelling) -> None:
    layer = build(spelling, dtype=dtype_of(spelling))
    check([layer], 0, [layer.example()], layer, grads=True)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_token_counts(tokens: int) -> None:
    for spelling in ONE_RANK:
        if spelling.batched or (tokens == 0 and spelling.outputs == "y_aux"):  # the mean of nothing is nan
            continue
        layer = build(spelling, dtype=dtype_of(spelling))
        check([layer], 0, [layer.example(tokens)], layer, grads=tokens > 0)


@pytest.fixture
def fake_group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


HARD = [s for s in ALL if s.needs_substitution]


@pytest.mark.parametrize("spelling", HARD + [s for s in ALL if s not in HARD][::8], ids=lambda s: s.id)
def test_needs_substitution(spelling: Spelling, fake_group: dist.ProcessGroup) -> None:
    layer = build(spelling, group=fake_group, dtype=torch.bfloat16 if spelling.bf16_only else torch.float64)
    if why(spelling) is None:
        assert len(capture(layer, *layer.example()).graph.nodes) > 10
    else:
        with pytest.raises(Exception, match=r"data-dependent|Data-dependent|marked as skipped"):
            capture(layer, *layer.example())


def check_exchanges(rank: int, spellings: list[Spelling], tokens: list[int]) -> int:
    """Every spelling on this rank; how many there were."""
    group, done, ranks = dist.group.WORLD, 0, dist.get_world_size()
    for s in spellings:
        layers = [build(s, Sizes(), group, dtype_of(s), rank=r) for r in range(ranks)]
        # A capacity counts for all ranks, so they need as many tokens.
        inputs = [m.example(tokens[0] if s.whole else tokens[r], seed=r) for r, m in enumerate(layers)]
        done += 1
        layer: Any = layers[rank]
        if s.cut_in_eager:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        try:
            check(layers, rank, inputs, layers[rank], grads=not s.cut_in_eager)
            if s.cut_in_eager and not s.needs_substitution and 0 not in tokens:
                check(layers, rank, inputs, layer, grads=True)
        except Exception as e:
            e.add_note(s.id)
            raise
    return done


@pytest.mark.parametrize("tokens", [[16, 10], [12, 0]], ids=str)
def test_two_ranks_equal_oracle(tokens: list[int]) -> None:
    # a loss that is a mean over no tokens is nan
    some = [s for s in RUNNABLE if 0 not in tokens or s.outputs != "y_aux"]
    assert run_ranks(2, check_exchanges, some, tokens) == [len(some)] * 2


def test_four_ranks_equal_oracle() -> None:
    some = RUNNABLE[::6]
    assert run_ranks(4, check_exchanges, some, [6, 4, 0, 8]) == [len(some)] * 4


def test_every_choice_is_covered() -> None:
    for field, values in CHOICES.items():
        assert {getattr(s, field) for s in ALL} >= set(values), field
    assert len({s.id for s in ALL}) == len(ALL)


def test_ranks_layers_are_one_layer() -> None:
    whole = build(Spelling())
    parts = [build(Spelling(exchange="functional"), rank=rank, ranks=2) for rank in range(2)]
    torch.testing.assert_close(
        torch.cat([p.ffn.weight("down") for p in parts]), whole.ffn.weight("down"), rtol=0, atol=0
    )
    torch.testing.assert_close(parts[1].router.weight, whole.router.weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"act": "relu", "fused": "chunk"}, "only a gated network"),
        ({"listed": True}, "nn.Linears need a loop"),
        ({"rows": "modulo"}, "another slot order"),
        ({"exchange": "plain", "weight_on": "hidden"}, "on another rank"),
        ({"regroup": "index"}, "regroup has no part"),
        ({"whole": "where_ids", "exchange": "plain"}, "does not exchange"),
    ],
)
def test_impossible_combinations(changes: dict[str, Any], problem: str) -> None:
    spelling = replace(Spelling(), **changes)
    with pytest.raises(ValueError, match=problem):
        build(spelling)
    assert {f.name for f in fields(Spelling)} >= set(changes)
