"""The multi-process helper itself: results, exceptions, deaths and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def _sum_of_ranks(rank: int, scale: int) -> torch.Tensor:
    total = torch.tensor([rank * scale])
    dist.all_reduce(total)
    return total


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("one is enough")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def _hang_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def _environment(rank: int) -> str | None:
    return os.environ.get("MOKFX_TEST_RANKS")


def test_results_come_back_in_rank_order() -> None:
    assert [int(value) for value in run_ranks(3, _sum_of_ranks, 10)] == [30, 30, 30]


def test_an_exception_names_its_rank() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised:.*ValueError: one is enough"):
        run_ranks(2, _fail_on_one)


def test_a_death_names_its_rank() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(2, _die_on_one)


def test_a_hang_ends_at_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not finish"):
        run_ranks(2, _hang_on_one, timeout=4.0)
    assert time.monotonic() - start < 30


def test_ranks_see_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(1, _environment)
    monkeypatch.setenv("MOKFX_TEST_RANKS", "here")
    assert run_ranks(1, _environment) == ["here"]
