"""What a term is worth: its definition, computed by counting and looping on concrete tensors.

It knows nothing of the pass's rules. A rule is true if a term and what the rule makes of it have one worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mokfx.passes.bijections import Sort
from mokfx.passes.terms import Term, rebuild
from mokfx.passes.value import Leaf, Stack, Value

Env = Mapping[Term, int]


class Unspecified(Exception):
    """The term reads what the program left undefined: a tensor beyond its end, or where a condition fails."""


def leaf(tensor: Tensor, name: str = "leaf", **known: Any) -> Leaf:
    """A leaf over a concrete tensor."""
    return Leaf(tensor, SimpleNamespace(name=name), **known)  # type: ignore[arg-type]


POINTWISE: dict[str, Callable[..., float]] = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
    "erf": math.erf,
    "exp": math.exp,
    "abs": abs,
    "sqrt": math.sqrt,
    "softplus": lambda x: math.log1p(math.exp(x)) if x <= 20 else x,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "clamp": lambda x, low, high: min(max(x, x if low is None else low), math.inf if high is None else high),
    "ratio": lambda a, b: a / b,
    "detached": lambda x: x,
    "cast": lambda x, dtype: x,
}


class Evaluator:
    """Evaluates terms. `size` gives symbolic sizes their numbers; `read` gives a leaf its tensor."""

    def __init__(
        self,
        size: Callable[[Any], int] = int,
        read: Callable[[Leaf], Tensor] = lambda leaf: leaf.tensor,
    ) -> None:
        self.size, self.read = size, read
        self.orders: dict[Any, tuple[list[int], list[int]]] = {}
        self.collections: dict[Any, list[float]] = {}

    def range(self, variables: Sequence[Term]) -> Iterator[dict[Term, int]]:
        """All positions of variables, the last one running fastest."""
        live = [v for v in variables if v.op == "var"]
        for values in product(*(range(self.size(v.args[1])) for v in live)):
            yield dict(zip(live, values, strict=True))

    def keys(self, variables: Sequence[Term], body: Term) -> list[float]:
        name = (tuple(variables), body)
        if name not in self.collections:
            self.collections[name] = [self(body, env) for env in self.range(variables)]
        return self.collections[name]

    def order(self, sort: Sort) -> tuple[list[int], list[int]]:
        """The sorted order of positions, and its inverse; an unstable sort's ties are in some other order."""
        if sort not in self.orders:
            keys = self.keys(sort.variables, sort.body)
            ties = range(len(keys)) if sort.tie is None else [(7 * i + 3) % 11 for i in range(len(keys))]
            there = sorted(range(len(keys)), key=lambda i: (keys[i], ties[i], i))
            back = sorted(range(len(keys)), key=lambda i: there[i])
            self.orders[sort] = there, back
        return self.orders[sort]

    def __call__(self, term: Term, env: Env) -> float:
        """The number that `term` is where variables are at the positions `env`.

        Raises:
            Unspecified: that depends on undefined memory.
        """
        if term.op == "var":
            return env[term]
        special = getattr(self, f"_{term.op}", None)
        if special is not None:
            return special(env, *term.args)
        return POINTWISE[term.op](*(self(a, env) if isinstance(a, Term) else a for a in term.args))

    # -- index terms ---

    def _int(self, env: Env, value: Any) -> int:
        return self.size(value)

    _size = _int

    def _lin(self, env: Env, constant: Any, parts: Sequence[tuple[Term, Any]]) -> float:
        return self.size(constant) + sum(self.size(c) * self(t, env) for t, c in parts)

    def _div(self, env: Env, term: Term, by: Any) -> float:
        return self(term, env) // self.size(by)

    def _mod(self, env: Env, term: Term, by: Any) -> float:
        return self(term, env) % self.size(by)

    def _perm(self, env: Env, sort: Sort, inverse: bool, position: Term) -> int:
        return self._element(self.order(sort)[inverse], self(position, env))

    def _seg(self, env: Env, keys: Any, position: Term) -> float:
        return self._element(sorted(self.keys(keys.variables, keys.body)), self(position, env))

    def _count(self, env: Env, keys: Any, key: Term) -> int:
        wanted = self(key, env)
        return sum(k == wanted for k in self.keys(keys.variables, keys.body))

    def _start(self, env: Env, keys: Any, key: Term) -> int:
        wanted = self(key, env)
        return sum(k < wanted for k in self.keys(keys.variables, keys.body))

    def _running(self, env: Env, sort: Sort, key: Term, position: Term) -> int:
        wanted, end = self(key, env), int(self(position, env)) + 1
        return sum(k == wanted for k in self.keys(sort.variables, sort.body)[:end])

    def _choose(self, env: Env, condition: Term, a: Term, b: Term) -> float:
        return self(a if self(condition, env) else b, env)

    def _element(self, items: Sequence[Any], position: float) -> Any:
        if not 0 <= position < len(items):
            raise Unspecified
        return items[int(position)]

    # -- data terms ---

    def _const(self, env: Env, value: float) -> float:
        return value

    def _at(self, env: Env, source: Leaf | Stack, away: tuple[Any, ...], *index: Term) -> float:
        assert not away, "no exchange is evaluated here"
        where = [int(self(i, env)) for i in index]
        if isinstance(source, Stack):
            source, where = self._element(source.leaves, where[0]), where[1:]
        tensor = self.read(source)
        if any(not 0 <= i < n for i, n in zip(where, tensor.shape, strict=True)):
            raise Unspecified
        return tensor[tuple(where)].item()

    def _delta(self, env: Env, a: Term, b: Term) -> float:
        return float(self(a, env) == self(b, env))

    def _lt(self, env: Env, a: Term, b: Term) -> float:
        return float(self(a, env) < self(b, env))

    def _nonzero(self, env: Env, number: Term) -> float:
        return float(self(number, env) != 0)

    def _valid(self, env: Env, condition: Term, term: Term) -> float:
        if not self(condition, env):
            raise Unspecified
        return self(term, env)

    def _mul(self, env: Env, *factors: Term) -> float:
        """Zero where one factor is, whatever the others are there: an indicator says where they count."""
        result, unspecified = 1.0, False
        for factor in factors:
            try:
                result *= self(factor, env)
            except Unspecified:
                unspecified = True
        if unspecified and result != 0:
            raise Unspecified
        return result

    def _add(self, env: Env, *terms: Term) -> float:
        return math.fsum(self(t, env) for t in terms)

    def _sum(self, env: Env, variable: Term, body: Term) -> float:
        return math.fsum(self(body, {**env, variable: i}) for i in range(self.size(variable.args[1])))


def elements(value: Value, evaluate: Evaluator) -> Tensor:
    """The tensor that a fact describes; nan where it is unspecified."""
    shape = [math.prod(evaluate.size(v.args[1]) for v in axis) for axis in value.axes]
    flat: list[float] = []
    for env in evaluate.range([v for axis in value.axes for v in axis]):
        try:
            flat.append(float(evaluate(value.body, env)))
        except Unspecified:
            flat.append(math.nan)
    return torch.tensor(flat, dtype=torch.float64).view(shape)


def simplified(term: Term) -> Term:
    """A term that was made without the simplifying constructors, through them."""
    return rebuild(term, simplified)
