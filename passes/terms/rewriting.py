"""Substitution: a term with variables replaced, rebuilt by the constructors, which simplify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mokfx.passes.terms.data import add, apply, at, choose, delta, lt, mul, nonzero, valid
from mokfx.passes.terms.index import div, lin, mod, perm, swap
from mokfx.passes.terms.rows import block_start, count, peer, running, seg, sender, start
from mokfx.passes.terms.term import Substitution, Term


def substitute(term: Term, mapping: Substitution) -> Term:
    """`term` with variables replaced, rebuilt by the simplifying constructors."""
    mapping = {v: t for v, t in mapping.items() if v is not t and v.op == "var"}
    if not mapping:
        return term
    targets = frozenset(mapping)
    done: dict[Term, Term] = {}

    def visit(node: Term) -> Term:
        if not (node.free & targets):
            return node
        if node not in done:
            done[node] = mapping[node] if node in mapping else rebuild(node, visit)
        return done[node]

    return visit(term)


def rebuild(term: Term, visit: Callable[[Term], Term]) -> Term:
    """`term` with `visit` applied to each child, through the constructor of its op."""
    op, args = term.op, term.args
    if op in ("var", "int", "const"):
        return term
    if op == "lin":
        return lin([(visit(t), c) for t, c in args[1]], args[0])
    if op in ("div", "mod"):
        return (div if op == "div" else mod)(visit(args[0]), args[1])
    if op == "perm":
        return perm(args[0], args[1], visit(args[2]))
    if op == "swap":
        return swap(args[0], args[1], visit(args[2]))
    if op == "sender":
        return sender(args[0], visit(args[1]))
    if op == "peer":
        return peer(args[0], args[1], args[2], visit(args[3]), visit(args[4]))
    if op == "block_start":
        return block_start(args[0], args[1], visit(args[2]), visit(args[3]))
    if op == "running":
        return running(args[0], visit(args[1]), visit(args[2]))
    if op in ("seg", "count", "start"):
        return {"seg": seg, "count": count, "start": start}[op](args[0], visit(args[1]))
    if op == "at":
        return at(args[0], visit_marks(args[1], visit), *(visit(a) for a in args[2:]))
    if op == "choose":
        return choose(*(visit(a) for a in args))
    if op == "nonzero":
        return nonzero(visit(args[0]))
    if op in ("delta", "lt", "valid"):
        return {"delta": delta, "lt": lt, "valid": valid}[op](visit(args[0]), visit(args[1]))
    if op in ("mul", "add"):
        return (mul if op == "mul" else add)(visit(a) for a in args)
    if op == "sum":
        from mokfx.passes.sums import total

        return total(args[0], visit(args[1]))
    return apply(op, *(visit(a) if isinstance(a, Term) else a for a in args))


def visit_marks(marks: tuple[Any, ...], visit: Callable[[Term], Term]) -> tuple[Any, ...]:
    """The marks of an element, with `visit` applied to the ranks that they name."""
    return tuple(tuple(visit(a) if isinstance(a, Term) else a for a in m) if isinstance(m, tuple) else m for m in marks)
