"""The term itself: an op and its arguments, interned, with what is asked of it often kept beside it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

Substitution: TypeAlias = dict["Term", "Term"]


class Term:
    """One node of a term. `op` names it; `args` holds terms and hashable attributes."""

    __slots__ = ("__weakref__", "args", "depth", "free", "inner", "looked_up", "op", "perms", "routed", "uid")

    op: str
    args: tuple[Any, ...]
    free: frozenset[Term]
    depth: int
    """How many nested `sum`s it holds: names the next bound variable."""
    inner: frozenset[Term]
    """The indicators that its indices are made with."""
    perms: frozenset[Any]
    """The bijections that occur in it."""
    routed: bool
    """Whether it depends on where routing put a row."""
    looked_up: bool
    """Whether it reads a tensor at a position that is itself data."""
    uid: int

    def __repr__(self) -> str:
        return render(self)

    def __lt__(self, other: Term) -> bool:
        return self.uid < other.uid


_interned: weakref.WeakValueDictionary[tuple[str, tuple[Any, ...]], Term] = weakref.WeakValueDictionary()


_uids = itertools.count()


def make(op: str, *args: Any) -> Term:
    """The term `op(args)`, one object for equal arguments. Use the constructors below: they simplify."""
    key = (op, args)
    term = _interned.get(key)
    if term is None:
        term = Term()
        term.op, term.args, term.uid = op, args, next(_uids)
        children = list(_children(args))
        bound = frozenset((args[0],)) if op == "sum" else frozenset()
        own = frozenset((term,)) if op == "var" else frozenset()
        term.free = frozenset().union(own, *(child.free for child in children)) - bound
        term.depth = max((child.depth for child in children), default=0) + (op == "sum")
        term.inner = frozenset().union(*(child.inner for child in children))
        if op in ("delta", "lt", "lin", "choose"):
            term.inner |= {f for child in children for f in factors_of(child) if f.op in CONDITIONS}
        term.perms = frozenset().union(*(child.perms for child in children))
        if op == "perm":
            term.perms |= {args[0]}
        data_index = op == "at" and any(_reads_data(child) for child in children)
        term.looked_up = data_index or any(child.looked_up for child in children)
        term.routed = op in ROUTED or bool(op == "at" and args[1]) or any(child.routed for child in children)
        _interned[key] = term
    return term


CONDITIONS = frozenset(("delta", "lt", "nonzero"))
"""Ops of terms that are 0 or 1."""
ROUTED = frozenset(
    [
        "perm",
        "swap",
        "seg",
        "count",
        "start",
        "delta",
        "lt",
        "nonzero",
        "choose",
        "valid",
        "running",
        "sender",
        "block_start",
    ]
)


def _reads_data(index: Term) -> bool:
    return index.op == "at" or any(_reads_data(child) for child in _children(index.args))


def children_of(term: Term) -> list[Term]:
    return list(_children(term.args))


def subterms(term: Term) -> set[Term]:
    """A term and all terms in it."""
    seen: set[Term] = set()
    todo = [term]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(_children(node.args))
    return seen


def _children(args: Iterable[Any]) -> Iterable[Term]:
    for arg in args:
        if isinstance(arg, Term):
            yield arg
        elif isinstance(arg, tuple):
            yield from _children(arg)


def match(pattern: Any, term: Any, found: Substitution) -> bool:
    """Whether `term` is `pattern` with its variables replaced; `found` gets the replacements."""
    if isinstance(pattern, Term):
        if pattern.op == "var":
            return found.setdefault(pattern, term) is term
        if not pattern.free:
            return pattern is term
        return isinstance(term, Term) and pattern.op == term.op and match(pattern.args, term.args, found)
    if isinstance(pattern, tuple) and isinstance(term, tuple) and len(pattern) == len(term):
        return all(match(p, t, found) for p, t in zip(pattern, term, strict=True))
    return bool(pattern == term)


def render(term: Term) -> str:
    """A term for people: used in debugging and in the reasons of misses."""
    op, args = term.op, term.args
    if op == "var":
        return f"v{args[0]}" if isinstance(args[0], int) else "".join(map(str, args[0]))
    if op in ("int", "const"):
        return f"{args[0]:g}" if isinstance(args[0], float) else str(args[0])
    if op == "lin":
        text = " + ".join(f"{t}" if c == 1 else f"{c}*{t}" for t, c in args[1])
        return f"({text} + {args[0]})" if args[0] != 0 else f"({text})"
    if op == "perm":
        return f"{args[0]}{'^-1' if args[1] else ''}[{args[2]}]"
    if op == "at":
        return f"{args[0]}{'@' * len(args[1])}[{', '.join(map(str, args[2:]))}]"
    if op == "sum":
        return f"sum_{args[0]}({args[1]})"
    if op in ("mul", "add"):
        return "(" + (" * " if op == "mul" else " + ").join(map(str, args)) + ")"
    return f"{op}({', '.join(map(str, args))})"


def factors_of(term: Term) -> tuple[Term, ...]:
    return term.args if term.op == "mul" else (term,)


def terms_of(term: Term) -> tuple[Term, ...]:
    return term.args if term.op == "add" else (term,)
