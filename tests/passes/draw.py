"""Random small routings, and random terms about them that no constructor has simplified."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from mokfx.passes.bijections import Sort, sort_of
from mokfx.passes.terms import Size, Term, const, integer, make, var
from mokfx.passes.value import Leaf

from .evaluate import leaf


@dataclass(repr=False)
class World:
    """Tokens that choose experts, and what else a layer's terms are about."""

    tokens: int
    top_k: int
    experts: int
    ids: Leaf
    weights: Leaf
    table: Leaf
    """One number for each expert."""
    sorts: tuple[Sort, ...]
    """Of the slots: token by token, choice by choice, with other ties, and of the first choices alone."""

    def __repr__(self) -> str:
        return f"World({self.ids.tensor.tolist()}, experts={self.experts})"

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k


@st.composite
def worlds(draw: st.DrawFn, least: int = 0) -> World:
    """0 to 4 tokens, 1 to 3 choices, 1 to 4 experts, drawn anew for every token: they may repeat."""
    tokens, top_k, experts = draw(st.integers(least, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    chosen = [draw(st.integers(0, experts - 1)) for _ in range(tokens * top_k)]
    ids = leaf(torch.tensor(chosen, dtype=torch.int64).view(tokens, top_k), "ids", bound=experts)
    numbers = torch.arange(1.0, 1 + tokens * top_k, dtype=torch.float64)
    token, choice = var(tokens), var(top_k)
    key = make("at", ids, (), token, choice)
    by_token, by_choice = [token, choice], [choice, token]
    first = make("at", ids, (), token, integer(0))
    sorts = [sort_of(key, by_token), sort_of(key, by_choice), sort_of(key, by_token, "ties")]
    sorts.append(sort_of(first, [token]))
    return World(
        tokens,
        top_k,
        experts,
        ids,
        leaf(numbers.view(tokens, top_k), "weights"),
        leaf(torch.arange(2.0, 2.0 + experts, dtype=torch.float64), "table"),
        tuple(sorts),
    )


@dataclass
class Terms:
    """Draws raw terms over the free variables that it makes on the way."""

    draw: st.DrawFn
    world: World
    made: list[Term]
    """Variables that are free so far."""

    def choose(self, *kinds: str) -> str:
        return self.draw(st.sampled_from(kinds))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def lin(self, constant: Size, *parts: tuple[Term, Size]) -> Term:
        return make("lin", constant, tuple(parts))

    def variable(self, size: int) -> Term:
        known = [v for v in self.made if v.args[1] == size]
        if known and self.draw(st.booleans()):
            return self.draw(st.sampled_from(known))
        variable = var(size)
        if variable.op == "var":
            self.made.append(variable)
        return variable

    def position(self, size: int, depth: int) -> Term:
        """An index in [0, size)."""
        kinds = ["variable", "int"]
        if depth > 0:
            kinds += ["mod", "div", "radix"]
            if any(s.size == size for s in self.world.sorts):
                kinds += ["perm"] * 4
            if size == self.world.experts:
                kinds += ["key"] * 3
        kind = self.draw(st.sampled_from(kinds))
        if kind == "int":
            return integer(self.number(0, size - 1))
        if kind == "mod":
            return make("mod", self.natural(depth - 1), size)
        if kind == "div":
            by = self.number(1, 3)
            return make("div", self.position(size * by, depth - 1), by)
        if kind == "radix":
            low = self.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            high = self.position(size // low, depth - 1)
            return self.lin(0, (high, low), (self.position(low, depth - 1), 1))
        if kind == "perm":
            sort = self.draw(st.sampled_from([s for s in self.world.sorts if s.size == size]))
            return make("perm", sort, self.draw(st.booleans()), self.position(size, depth - 1))
        return self.key(depth) if kind == "key" else self.variable(size)

    def key(self, depth: int) -> Term:
        """An expert's number."""
        world, kind = self.world, self.choose("id", "id", "slot", "seg", "int")
        if kind == "int" or depth <= 0:
            return integer(self.number(0, world.experts - 1))
        if kind == "id":
            where = self.position(world.tokens, depth - 1), self.position(world.top_k, depth - 1)
            return make("at", world.ids, (), *where)
        if kind == "slot":
            slot = self.position(world.slots, depth - 1)
            digits = make("div", slot, world.top_k), make("mod", slot, world.top_k)
            return make("at", world.ids, (), *digits)
        sort = self.draw(st.sampled_from(world.sorts))
        return make("seg", sort.keys, self.position(int(sort.size), depth - 1))

    def natural(self, depth: int) -> Term:
        """A number that is not negative."""
        kind = self.choose("position", "count", "start", "lin") if depth > 0 else "position"
        keys = self.draw(st.sampled_from(self.world.sorts)).keys
        if kind == "position":
            return self.position(self.number(1, 6), depth)
        if kind in ("count", "start"):
            return make(kind, keys, self.key(depth - 1))
        parts = [(self.natural(depth - 1), self.number(0, 4)) for _ in range(self.number(1, 2))]
        return self.lin(self.number(0, 5), *parts)

    def whole(self, depth: int) -> Term:
        """Any whole number: a row's place among its expert's, say."""
        sort = self.draw(st.sampled_from(self.world.sorts))
        kind = self.choose("natural", "place", "row", "running", "minus") if depth > 0 else "natural"
        if kind == "natural":
            return self.natural(depth)
        if kind == "minus":
            return self.lin(self.number(-3, 3), (self.natural(depth - 1), 1), (self.natural(depth - 1), -1))
        slot = self.position(int(sort.size), depth - 1)
        key = self.draw(st.sampled_from([sort.key_at(slot), self.key(depth - 1)]))
        first = make("start", sort.keys, key)
        if kind == "place":
            return self.lin(0, (make("perm", sort, True, slot), 1), (first, -1))
        if kind == "running" and sort.tie is None:
            return make("running", sort, key, slot)
        return self.lin(0, (first, 1), (self.position(3, depth - 1), 1))

    def real(self, depth: int) -> Term:
        """A number of the data: a sum of selected elements, say."""
        world = self.world
        kinds = ("const", "weight", "table", "delta", "lt", "mul", "mul", "add", "sum", "sum")
        kind = self.choose(*kinds) if depth > 0 else self.choose("const", "table")
        if kind == "const":
            return const(self.number(-2, 2))
        if kind == "weight":
            where = self.position(world.tokens, depth - 1), self.position(world.top_k, depth - 1)
            return make("at", world.weights, (), *where)
        if kind == "table":
            return make("at", world.table, (), self.position(world.experts, depth - 1))
        if kind == "delta":
            size = self.draw(st.sampled_from([world.experts, world.tokens, world.slots]))
            return make("delta", self.position(size, depth - 1), self.position(size, depth - 1))
        if kind == "lt":
            sort = self.draw(st.sampled_from(world.sorts))
            limits = integer(self.number(0, 4)), make("count", sort.keys, self.key(1))
            return make("lt", self.whole(depth - 1), self.draw(st.sampled_from(limits)))
        if kind == "sum":
            return self.sum(depth)
        return make(kind, *(self.real(depth - 1) for _ in range(self.number(2, 3))))

    def sum(self, depth: int) -> Term:
        """Over experts, choices, tokens or slots; often with a one-hot factor or an indicator."""
        world = self.world
        sizes = [world.experts, world.experts, world.top_k, world.tokens, world.slots]
        size = self.draw(st.sampled_from(sizes))
        variable = var(size)
        if variable.op != "var":
            return self.real(depth - 1)
        self.made.append(variable)
        factors = [self.real(depth - 1)]
        if self.draw(st.booleans()):
            factors.append(make("delta", variable, self.position(size, depth - 1)))
        body = make("mul", *factors) if len(factors) > 1 else factors[0]
        self.made.remove(variable)
        return make("sum", variable, body)
