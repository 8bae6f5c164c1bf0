"""Whose rows a fact is about: the expert ids that routed them tell one layer of a model from another."""

from __future__ import annotations

from mokfx.passes.terms import Term, children_of
from mokfx.passes.value import Value


def owners(values: tuple[Value, ...]) -> set[object]:
    """The expert ids that routed what these facts are about."""
    return {leaf for value in values for leaf in ids_behind(value.body)}


def ids_behind(term: Term) -> set[object]:
    """The integer tensors whose entries decide where the rows of a term are."""
    found: set[object] = set()
    todo: list[Term] = [term]
    seen: set[Term] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "at":
            tensor = getattr(node.args[0], "tensor", None)
            if tensor is not None and not tensor.is_floating_point():
                found.add(node.args[0])
        for arg in node.args:
            body = getattr(arg, "body", None) or getattr(getattr(arg, "keys_sent", None), "body", None)
            if isinstance(body, Term):
                todo.append(body)
        todo.extend(children_of(node))
    return found


def reads_matrices(term: Term) -> bool:
    """Whether a term reads whole matrices at positions that are data, as a gather of expert weights does."""
    if not term.looked_up:
        return False
    if term.op == "at" and any(index.op == "at" for index in term.args[2:]):
        return sum(index.op == "var" for index in term.args[2:]) >= 2
    return any(reads_matrices(child) for child in children_of(term))


def is_rows(value: Value) -> bool:
    """Whether a fact is about data on its way through the experts, not about indices or counts."""
    return value.body.depth > 0 or _has_rows(value.body)


def _has_rows(term: Term) -> bool:
    tensor = getattr(term.args[0], "tensor", None) if term.op == "at" else None
    if tensor is not None and tensor.is_floating_point() and term.routed:
        return True
    return any(_has_rows(child) for child in children_of(term))
