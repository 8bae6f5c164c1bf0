"""Writing at computed positions, through views and in place: the facts hold of what was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .witness import assert_facts

IDS = torch.tensor([[1, 0], [3, 1], [0, 3], [1, 3]])
"""Expert 2 has no token."""


def slots(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order of the slots, and their rows in it."""
    order = ids.reshape(-1).argsort(stable=True)
    return order, x[order // 2]


def set_rows(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    out = torch.zeros_like(rows)
    out[order] = rows
    return out


def set_over(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    out = torch.ones_like(rows)
    out[order] = rows
    return out + 1


def add_rows(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    return torch.ones_like(x).index_add(0, order // 2, rows)


def add_scaled(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    return torch.zeros_like(x).index_add(0, order // 2, rows, alpha=2)


def add_by_choice(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.t().reshape(-1).argsort(stable=True)
    return torch.zeros_like(x).index_add(0, order % x.shape[0], x[order % x.shape[0]])


def put_accumulate(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    return torch.zeros_like(x).index_put((order // 2,), rows, accumulate=True)


def masked_rows(x: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(4):
        y[ids[:, 0] == e] = x[ids[:, 0] == e] * (e + 1)
    return y


def masked_twice(x: Tensor, ids: Tensor) -> Tensor:
    """The second write is over the first, not beside it."""
    y = torch.zeros_like(x)
    y[ids[:, 0] == 1] = x[ids[:, 0] == 1]
    y[ids[:, 1] == 3] = x[ids[:, 1] == 3] * 2
    return y


def added_twice(x: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for choice in range(2):
        for e in range(4):
            y[ids[:, choice] == e] += x[ids[:, choice] == e] * (e + 1)
    return y


def added_once(x: Tensor, ids: Tensor) -> Tensor:
    """`y[token] += v` adds one of the rows of a token that chose an expert twice."""
    order, rows = slots(x, ids)
    y = torch.zeros_like(x)
    y[order // 2] += rows
    return y


def segments(x: Tensor, ids: Tensor) -> Tensor:
    _, rows = slots(x, ids)
    counts = torch.nn.functional.one_hot(ids.reshape(-1), 4).sum(0)
    out, begin = torch.empty_like(rows), 0
    for e, size in enumerate(counts.tolist()):
        out[begin : begin + size] = rows[begin : begin + size] * (e + 1)
        begin = begin + size
    return out


def columns(x: Tensor, ids: Tensor) -> Tensor:
    _, rows = slots(x, ids)
    out = torch.zeros(rows.shape[0], 4, dtype=x.dtype)
    out[:, 1:3] = rows
    out[:, 0] = rows[:, 0] * 3
    out.t()[3].copy_(rows[:, 1])
    return out


def views(x: Tensor, ids: Tensor) -> Tensor:
    _, rows = slots(x, ids)
    rows = rows.clone()
    view = rows.view(4, 2, -1)
    view *= 2
    rows[0].add_(1)
    return view.reshape(-1)


def buckets(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    expert = ids.reshape(-1)[order]
    counts = torch.bincount(ids.reshape(-1), minlength=4)
    place = torch.arange(order.shape[0]) - (counts.cumsum(0) - counts)[expert]
    padded = rows.new_zeros(4, 8, rows.shape[-1])
    padded[expert, place] = rows
    return (padded * 2)[expert, place]


def inverse(x: Tensor, ids: Tensor) -> Tensor:
    order, rows = slots(x, ids)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return rows[back]


def one_hot(x: Tensor, ids: Tensor) -> Tensor:
    chosen = torch.zeros(4, 4, dtype=x.dtype).scatter(1, ids, 1.0)
    weighted = torch.zeros(4, 4, dtype=x.dtype).scatter(1, ids, x)
    return chosen.sum(0) + weighted.sum(0)


FUNCTIONS = [
    set_rows, set_over, add_rows, add_scaled, add_by_choice, put_accumulate, masked_rows, masked_twice,
    added_twice, added_once, segments, columns, views, buckets, inverse, one_hot,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ids", [IDS, IDS * 0 + torch.tensor([2, 1])], ids=["some", "same"])
def test_writes(function: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> None:
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)
    assert assert_facts(function, x, ids) > 2


def test_repeated_choices() -> None:
    """Ids that no top-k made may repeat in a row."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)
    ids = torch.tensor([[1, 1], [3, 1], [0, 0], [1, 3]])
    for function in (add_rows, added_twice, added_once, masked_twice, set_rows, buckets):
        assert assert_facts(function, x, ids) > 2
