"""Rows of another rank: what an all-to-all with equal splits brings, and takes back.

Block d of a tensor goes to rank d. So a term that came from rank s is a term of rank s, about its tensors and
its order of slots: such parts are marked with s. They are this rank's own again only where a second exchange
takes them back to the rank that they came from; whatever else a program does with them, the mark stays, and
nothing matches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mokfx.passes.terms import Substitution, Term, at, children_of, make, rebuild, substitute, swap

LOCAL = frozenset(("at", "perm", "seg", "count", "start", "running", "sender", "block_start", "peer"))
"""Terms whose value depends on the rank."""
WHOLE = LOCAL | {"lin", "div", "mod", "choose", "delta", "lt", "nonzero"}
"""Terms that travel as one."""


@dataclass(frozen=True)
class Abroad:
    """A term of another rank, over positions that each rank can name."""

    variables: tuple[Term, ...]
    body: Term
    bound: ClassVar[None] = None
    definition: ClassVar[None] = None
    distinct: ClassVar[bool] = False
    dropped: ClassVar[bool] = False

    def home(self, index: tuple[Term, ...]) -> Term:
        return substitute(self.body, dict(zip(self.variables, index, strict=True)))

    def __str__(self) -> str:
        return f"<{self.body}>"


def mark(group: str, ranks: int, source: Term) -> tuple[Any, ...]:
    """The mark of a term of rank `source`."""
    return ("equal", group, ranks, source)


def mirrored(marks: tuple[Any, ...]) -> tuple[Any, ...]:
    """The marks of who reads a row, given those of the row: the same exchange, from its other side."""
    return tuple((*m[:3], swap(m[1], m[2], m[3])) if is_equal(m) else m for m in marks)


def is_equal(m: object) -> bool:
    return isinstance(m, tuple) and len(m) == 4 and m[0] == "equal"


def received(term: Term, group: str, ranks: int, source: Term) -> Term | None:
    """`term` as rank `source` has it, on the rank that it was sent to; None if it would name a third rank."""
    home = mark(group, ranks, swap(group, ranks, source))
    there = mark(group, ranks, source)
    done: dict[Term, Term | None] = {}

    def visit(node: Term) -> Term | None:
        if node not in done:
            done[node] = cross(node)
        return done[node]

    def cross(node: Term) -> Term | None:
        if not _local(node):
            return node
        if node.op == "at":
            leaf, marks, *index = node.args
            named = not any(map(_local, index))
            if marks:
                if not named or marks != (home,):
                    return None
                return leaf.home(tuple(index)) if isinstance(leaf, Abroad) else at(leaf, (), *index)
            if named:
                return at(leaf, (there,), *index)
        if node.op in WHOLE:
            return None if _travelled(node) or node.depth else _wrapped(node, there)
        if any(visit(child) is None for child in children_of(node)):
            return None
        return rebuild(node, lambda child: done.get(child) or child)

    return visit(term)


def _wrapped(term: Term, there: tuple[Any, ...]) -> Term:
    actual = tuple(sorted(term.free))
    variables = tuple(make("var", ("a", i), v.args[1]) for i, v in enumerate(actual))
    mapping: Substitution = dict(zip(actual, variables, strict=True))
    return at(Abroad(variables, substitute(term, mapping)), (there,), *actual)


def _local(term: Term) -> bool:
    return term.op in LOCAL or any(map(_local, children_of(term)))


def _travelled(term: Term) -> bool:
    """Whether a term holds one of another rank."""
    return (term.op == "at" and bool(term.args[1])) or any(map(_travelled, children_of(term)))
