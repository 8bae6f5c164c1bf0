"""Several layers in one graph, between dense layers and residuals."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .composed import outcome_of
from .models import Layer, inputs, seeded
from .support import assert_same, compiled, run


class Block(nn.Module):
    def __init__(self, residual: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.dense = nn.Linear(8, 8, dtype=torch.float64)
        self.moe = Layer()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        if self.residual == "none":
            return self.moe(self.norm(x))
        if self.residual == "of its input":  # the same tensor goes into the layer and past it
            return x + self.moe(x)
        y = self.moe(self.norm(x))
        y += x
        return y


class Blocks(nn.Module):
    def __init__(self, residual: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(residual) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def check(model: nn.Module, calls: int) -> None:
    x = inputs(6)
    with compiled(model) as (function, record):
        got = run(function, model, x)
    assert len(record.outcome.matches) == len(record.calls) == calls, record.outcome.misses
    assert not any(call.kwargs.get("shared_w_up") for call in record.calls)
    assert "bmm" not in record.names()
    assert_same(got, run(model, model, x))


def test_three_layers() -> None:
    check(seeded(lambda: Blocks("none")), 3)


def test_residual() -> None:
    check(seeded(lambda: Blocks("of its input")), 3)


def test_residual_in_place() -> None:
    check(seeded(lambda: Blocks("in place")), 3)


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.moe(x.tanh())


def test_one_layer_twice() -> None:
    check(seeded(Twice), 2)


class Sum(nn.Module):
    """Two layers of the same tokens: neither is the other's shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def test_two_layers_of_the_same_tokens() -> None:
    check(seeded(Sum), 2)


class Embedded(nn.Module):
    """Tokens that a table gives, a scale that is one number, and a sum of two things before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.moe = Layer()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.table(torch.arange(x.shape[0]) % 5) + x
        heads = tokens.view(x.shape[0], 2, 4)
        mixed = (heads @ heads.transpose(1, 2) @ heads).reshape(x.shape)
        return tokens * self.scale + self.moe(mixed * self.scale)


def test_a_table_of_tokens_is_no_expert() -> None:
    model, x = seeded(Embedded), inputs(6)
    check(model, 1)
    assert not outcome_of(model, x).outcome.misses


class Cached(nn.Module):
    """Joins its rows to a cache that is an empty vector at first, as caches of keys and values are."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Layer()

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.cat([x.new_empty(0), x.view(2, -1, x.shape[-1])], dim=-2)
        return self.moe(x) + kept.view(x.shape)


def test_an_empty_cache_before_the_layer() -> None:
    check(seeded(Cached), 1)
