"""The named bijections of a layer: sorting slots by expert, and exchanging rows within a group.

They are values: two that do the same thing are equal, wherever in the graph they were built. That is what lets a
permutation meet its inverse, however each was spelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy

from mokfx.passes.groups import group_rank
from mokfx.passes.terms import (
    Size,
    Substitution,
    Term,
    bound,
    children_of,
    count,
    integer,
    lin,
    make,
    match,
    mod,
    perm,
    product,
    radix,
    seg,
    sender,
    substitute,
    swap,
    unflatten,
)

RECEIVED = sympy.Symbol("received", integer=True, nonnegative=True)
"""The number of rows that an exchange brings: data, so it has one name instead of a size."""


@dataclass(frozen=True)
class Keys:
    """A collection of expert ids, one for each position of `variables`, in no particular order."""

    variables: tuple[Term, ...]
    body: Term

    def __str__(self) -> str:
        return f"{self.body}"


def _canonical(body: Term, variables: Sequence[Term], name: str) -> tuple[tuple[Term, ...], Term]:
    """`variables` of `body` renamed by position; the rows of an exchange lose their size, which is data."""
    renamed = {}
    for i, variable in enumerate(variables):
        if variable.op == "var":
            size = RECEIVED if _counts_received(body, variable) else variable.args[1]
            renamed[variable] = make("var", (name, i), size)
    return tuple(renamed.get(v, v) for v in variables), substitute(body, renamed)


def _counts_received(body: Term, variable: Term) -> bool:
    return any(isinstance(p, Exchange) for p in body.perms) and body.free == {variable}


def _by_appearance(body: Term) -> list[Term]:
    seen: dict[Term, None] = {}
    todo: list[object] = [body]
    while todo:
        node = todo.pop()
        if isinstance(node, Term):
            if node.op == "var":
                seen.setdefault(node)
            elif node.free:
                todo.extend(reversed(node.args))
        elif isinstance(node, tuple):
            todo.extend(reversed(node))
    return [v for v in seen if v in body.free]


def keys_of(body: Term) -> Keys:
    """The keys that `body` takes over all positions of its free variables."""
    if body.op == "seg" and body.args[1].op == "var":
        known: Keys = body.args[0]
        size = product(v.args[1] for v in known.variables if v.op == "var")
        if size in (RECEIVED, body.args[1].args[1]):
            return known
    variables, body = _canonical(body, _by_appearance(body), "k")
    return Keys(variables, body)


def all_of(keys: Keys, experts: int) -> Term:
    """How many keys there are, as the sum of the counts of each expert."""
    return lin((count(keys, integer(e)), 1) for e in range(experts))


def rows_counted(number: Term) -> Size | None:
    """The number of slots, if `number` is the sum of the counts of all experts."""
    owners = {t.args[0] for t, _ in number.args[1] if t.op == "count"} if number.op == "lin" else set()
    if len(owners) != 1:
        return None
    (keys,) = owners
    experts = None if has_dropped(keys.body) else bound(keys.body)
    sizes = [v.args[1] for v in keys.variables if v.op == "var"]
    if not isinstance(experts, int) or number is not all_of(keys, experts) or RECEIVED in sizes:
        return None
    return product(sizes)


def has_dropped(keys: Term) -> bool:
    """Whether some keys are -1, of slots that are dropped: then the rows of all experts are not all slots."""
    own = keys.op == "at" and getattr(keys.args[0], "dropped", False)
    return bool(own) or any(map(has_dropped, children_of(keys)))


def is_nothing(number: Term) -> bool:
    """Whether a number is 0: of all rows, what is left when those of each expert are taken away."""
    if number.op != "lin":
        return number is integer(0)
    total = number.args[0]
    return rows_counted(lin([(number, -1)], total)) == total


@dataclass(frozen=True)
class Sort:
    """The order that sorts a flattened tensor of keys: sorted position -> position before."""

    variables: tuple[Term, ...]
    body: Term
    tie: Hashable = None
    """None for a stable sort; else what tells this sort's choice among equal keys from another's."""
    name: str = field(default="order", compare=False)
    """What the program calls it."""

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(v.args[1] if v.op == "var" else 1 for v in self.variables)

    @cached_property
    def size(self) -> Size:
        return product(self.sizes)

    @cached_property
    def keys(self) -> Keys:
        return keys_of(self.body)

    def key_at(self, position: Term) -> Term:
        """The key at a position before sorting."""
        parts = unflatten(position, self.sizes)
        return substitute(self.body, dict(zip(self.variables, parts, strict=True)))

    def position_of(self, key: Term) -> Term | None:
        """The position at which `key` is read, if it is one of the keys."""
        found: Substitution = {}
        if not match(self.body, key, found) or any(v not in found for v in self.variables if v.op == "var"):
            return None
        return radix([found.get(v, v) for v in self.variables], self.sizes)

    def limit(self, inverse: bool) -> Size:
        """How many positions there are, before sorting as after."""
        return self.size

    def rows_are(self, number: Term, inverse: bool) -> bool:
        """Whether `number` is how many rows are sorted: all positions, before and after, are smaller."""
        experts = None if has_dropped(self.body) else bound(self.body)
        return isinstance(experts, int) and number is all_of(self.keys, experts)

    def __str__(self) -> str:
        return f"the order `{self.name}`"


def sort_of(body: Term, variables: Sequence[Term], tie: Hashable = None, name: str = "order") -> Sort:
    """The sort of keys `body` flattened over `variables` (major to minor)."""
    variables, body = _canonical(body, variables, "p")
    return Sort(variables, body, tie, name)


@dataclass(frozen=True)
class Exchange:
    """Rows sorted by expert travel to the ranks that own the experts: received row -> the row its sender had.

    Each of `ranks` ranks owns `local_experts` experts in a contiguous block; rows arrive ordered by sender.
    """

    group: str
    ranks: int
    local_experts: int
    keys_sent: Keys

    def limit(self, inverse: bool) -> Size | None:
        """How many rows a sender has; how many arrive (`inverse`) is data."""
        sizes = [v.args[1] for v in self.keys_sent.variables if v.op == "var"]
        return None if inverse or RECEIVED in sizes else product(sizes)

    @cached_property
    def local_keys(self) -> Keys:
        """The local expert of each received row."""
        row = make("var", ("k", 0), RECEIVED)
        return keys_of(mod(seg(self.keys_sent, perm(self, False, row)), self.local_experts))

    @cached_property
    def by_expert(self) -> Sort:
        """The stable order that groups the received rows by local expert, then sender."""
        row = make("var", ("p", 0), RECEIVED)
        return sort_of(mod(seg(self.keys_sent, perm(self, False, row)), self.local_experts), [row])

    @cached_property
    def first_expert(self) -> int | None:
        """The first expert of this rank, if the group is known to this process."""
        rank = group_rank(self.group)
        return None if rank is None else rank * self.local_experts

    def rows_are(self, number: Term, inverse: bool) -> bool:
        """Whether `number` is how many rows arrive (`inverse`) or are sent: all positions there are smaller."""
        if has_dropped(self.keys_sent.body):
            return False
        if inverse:
            return number is all_of(self.local_keys, self.local_experts)
        return number is all_of(self.keys_sent, self.ranks * self.local_experts)

    def segment_order(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The segments (sender, local expert) of the received rows: as they arrive, and grouped by expert."""
        senders, experts = range(self.ranks), range(self.local_experts)
        return [(s, e) for s in senders for e in experts], [(s, e) for e in experts for s in senders]

    def count_from(self, source: Term, local: Term) -> Term:
        """How many rows rank `source` sends to a local expert of this rank."""
        return count(self.keys_sent, lin([(swap(self.group, self.ranks, source), self.local_experts), (local, 1)]))

    def segment_of(self, row: Term) -> tuple[Term, Term]:
        """The segment (sender, local expert) of a received row."""
        return sender(self, row), mod(seg(self.keys_sent, perm(self, False, row)), self.local_experts)

    def __str__(self) -> str:
        return f"the all-to-all over group {self.group!r}"
