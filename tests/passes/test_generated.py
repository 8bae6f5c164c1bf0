"""Composed layers all become one call and keep their numbers; with a fault planted, none becomes wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from ..spellings.faults import FAULTS, Fault, plant
from ..spellings.layer import MoE, build
from ..spellings.spelling import Sizes, Spelling
from ..spellings.strangers import NEEDS_GROUP, STRANGERS
from ..spellings.strategies import faulty_spellings, sample, spellings
from .composed import (
    assert_graph_unchanged_in_meaning,
    assert_one_call,
    check_layer,
    dtype_of,
    fake_group,
    outcome_of,
)

CHUNK = 10
ONE_RANK, EXCHANGED, FAULTY = 220, 100, 130


@cache
def drawn(exchanged: bool, count: int) -> list[Spelling]:
    """Different ones; hypothesis draws some again."""
    return list(dict.fromkeys(map(within_reach, sample(spellings(exchanged=exchanged), count * 3 // 2))))[
        :count
    ]


def within_reach(s: Spelling) -> Spelling:
    """Two things with an exchange are left alone, so another choice stands for them: counts of unknown length

    (`torch.bincount`, which `mokfx.compile` gives its length), and buckets for ids of unknown range (a table's).
    """
    if s.exchange and s.counts in ("bincount", "bincount_method"):
        s = replace(s, counts="histc")
    if s.exchange and s.whole and s.router == "given_ids":
        s = replace(s, router="hashed_ids")
    return s


@cache
def drawn_faulty(exchanged: bool, count: int) -> list[tuple[Spelling, Fault]]:
    pairs = {(s, f.name): (s, f) for s, f in sample(faulty_spellings(exchanged=exchanged), count * 3 // 2)}
    return list(pairs.values())[:count]


def chunks(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("start", range(0, count, CHUNK))


def test_there_are_enough() -> None:
    assert len(drawn(False, ONE_RANK)) + len(drawn(True, EXCHANGED)) >= 300
    assert len(drawn_faulty(False, FAULTY // 2)) + len(drawn_faulty(True, FAULTY // 2)) >= 100


@chunks(ONE_RANK)
def test_one_rank(start: int) -> None:
    for spelling in drawn(False, ONE_RANK)[start : start + CHUNK]:
        try:
            check_layer(spelling)
        except BaseException as error:
            error.add_note(spelling.id)
            raise


@chunks(EXCHANGED)
def test_exchanged(start: int) -> None:
    """Matching alone: test_expert_parallel.py runs them."""
    with fake_group(rank=start // CHUNK % 2) as group:
        for spelling in drawn(True, EXCHANGED)[start : start + CHUNK]:
            layer = build(spelling, group=group, dtype=dtype_of(spelling))
            try:
                assert_one_call(outcome_of(layer, *layer.example()))
            except BaseException as error:
                error.add_note(spelling.id)
                raise


def captures(spelling: Spelling, fault: Fault) -> bool:
    """`F.dropout` asks whether there are rows, which data decides where an expert has its own rows alone."""
    return fault.name != "dropout" or spelling.products not in ("loop_split", "loop_slices", "loop_offsets")


@chunks(FAULTY // 2)
def test_one_rank_with_a_fault(start: int) -> None:
    for spelling, fault in drawn_faulty(False, FAULTY // 2)[start : start + CHUNK]:
        if not captures(spelling, fault):
            continue

        def make(spelling: Spelling = spelling, fault: Fault = fault) -> MoE:
            return plant(fault, build(spelling, dtype=dtype_of(spelling)))

        try:
            layer = make()
            outcome = outcome_of(layer, *layer.example()).outcome
            if fault.expectation == "refused":
                assert not outcome.matches
                assert any(miss.reason for miss in outcome.misses)
            elif outcome.matches:
                assert_graph_unchanged_in_meaning(make)
        except BaseException as error:
            error.add_note(f"{fault.name}: {spelling.id}")
            raise


@chunks(FAULTY // 2)
def test_exchanged_with_a_fault(start: int) -> None:
    """What matches of those that may is run by test_expert_parallel.py."""
    with fake_group() as group:
        for spelling, fault in drawn_faulty(True, FAULTY // 2)[start : start + CHUNK]:
            if fault.expectation != "refused" or not captures(spelling, fault):
                continue
            layer = plant(fault, build(spelling, group=group, dtype=dtype_of(spelling)))
            try:
                outcome = outcome_of(layer, *layer.example()).outcome
                assert not outcome.matches
                assert any(miss.reason for miss in outcome.misses)
            except BaseException as error:
                error.add_note(f"{fault.name}: {spelling.id}")
                raise


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_left_alone(name: str) -> None:
    _, make = STRANGERS[name]
    with fake_group() as group:
        layer = make(Sizes(), group if name in NEEDS_GROUP else None, torch.float64)
        record = outcome_of(layer, torch.randn(16, 16, dtype=torch.float64, requires_grad=True))
    assert not record.outcome.matches
    assert not record.calls
    assert record.modules[-1].code == record.before[-1]


def test_every_fault_is_drawn() -> None:
    """At least most of them, for a word on how much the hundred say."""
    names = {f.name for exchanged in (False, True) for _, f in drawn_faulty(exchanged, FAULTY // 2)}
    assert len(names) > len(FAULTS) // 2
