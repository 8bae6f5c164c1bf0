"""Work and floors: by hand, by counting every choice, and against the floors of the design."""

from __future__ import annotations

from itertools import combinations

import pytest

from mokfx.page.cards import CARDS, DEFAULT
from mokfx.page.picture import Sizes
from mokfx.page.work import exchanged, experts_used, floor_of, work_of


def sizes(**changes: int | str | bool) -> Sizes:
    known = {"hidden": 8, "intermediate": 16, "experts": 8, "top_k": 2, "ranks": 1, "dtype": "bfloat16", "gated": True}
    return Sizes(tokens=4, **{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "top_k", "tokens", "milliseconds"),
    [
        (2048, 768, 128, 8, 8192, 0.78),
        (2048, 1024, 64, 8, 8192, 1.04),
        (4096, 14336, 8, 2, 8192, 7.31),
        (7168, 2048, 32, 8, 4096, 3.65),
    ],
    ids=["qwen3-30b", "olmoe", "mixtral", "dsv3-32e"],
)
def test_the_measured_floors_of_the_h200(
    hidden: int, intermediate: int, experts: int, top_k: int, tokens: int, milliseconds: float
) -> None:
    layer = sizes(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    forward, backward = (floor_of(work, CARDS["H200"]) for work in work_of(layer, tokens))
    assert forward.seconds == pytest.approx(milliseconds / 1e3, rel=0.01)
    assert forward.bound == "compute"
    assert backward.compute == pytest.approx(2 * forward.compute)


def test_a_layer_by_hand() -> None:
    forward, backward = work_of(sizes(), 4)
    used = 8 * (1 - (6 / 8) ** 4)
    weights = used * 3 * 8 * 16 * 2
    assert forward.flops == 6 * (4 * 2) * 8 * 16
    assert forward.hbm == pytest.approx(2 * (4 * 8 * 2) + weights + 8 * 12)
    assert backward.hbm == pytest.approx(3 * (4 * 8 * 2) + 2 * weights + 8 * 12 + 8 * 4)
    assert forward.nvlink == backward.nvlink == 0


def test_two_matrices_and_a_shared_expert() -> None:
    plain = work_of(sizes(), 64)[0]
    without_gate = work_of(sizes(gated=False), 64)[0]
    shared = work_of(sizes(shared=32), 64)[0]
    assert without_gate.flops == pytest.approx(plain.flops * 2 / 3)
    assert shared.flops - plain.flops == 6 * 64 * 8 * 32
    assert shared.hbm - plain.hbm == 3 * 8 * 32 * 2


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 2), (8, 3, 4), (6, 6, 3), (4, 1, 4)])
def test_what_travels_is_the_average_over_every_choice(experts: int, top_k: int, ranks: int) -> None:
    choices = list(combinations(range(experts), top_k))
    owner = [expert // (experts // ranks) for expert in range(experts)]
    sent = sum(len({owner[e] for e in choice} - {0}) for choice in choices) / len(choices)
    returned = sum(sum(owner[e] != 0 for e in choice) for choice in choices) / len(choices)
    layer = sizes(experts=experts, top_k=top_k, ranks=ranks)
    assert exchanged(layer, 10) == pytest.approx((10 * sent, 10 * returned))


@pytest.mark.parametrize(("top_k", "ranks", "tokens"), [(1, 1, 3), (2, 1, 2), (2, 2, 1)])
def test_experts_used_is_the_average_over_every_choice(top_k: int, ranks: int, tokens: int) -> None:
    experts = 4
    choices = list(combinations(range(experts), top_k))
    batches = [[]]  # type: list[list[int]]
    for _ in range(tokens * ranks):
        batches = [[*batch, *choice] for batch in batches for choice in choices]
    first_rank = range(experts // ranks)
    average = sum(len(set(batch) & set(first_rank)) for batch in batches) / len(batches)
    assert experts_used(sizes(experts=experts, top_k=top_k, ranks=ranks), tokens) == pytest.approx(average)


def test_few_tokens_are_bound_by_memory_and_far_ones_by_nvlink() -> None:
    big = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
    assert floor_of(work_of(sizes(**big), 1)[0], CARDS["B200"]).bound == "HBM"
    assert floor_of(work_of(sizes(**big, ranks=8), 8192)[0], CARDS["B200"]).bound == "NVLink"


def test_wider_numbers_are_counted_as_bf16() -> None:
    assert work_of(sizes(dtype="float64"), 32) == work_of(sizes(dtype="bfloat16"), 32)


def test_cards_say_where_their_figures_are_from() -> None:
    assert DEFAULT in CARDS
    assert [card.name for card in CARDS.values() if card.measured] == ["H200"]
    assert all("NVIDIA" in card.source or card.measured for card in CARDS.values())
