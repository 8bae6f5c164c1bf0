"""All-to-alls: rows or counts seen from the other side of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mokfx.passes.abroad import received
from mokfx.passes.bijections import Exchange, Keys
from mokfx.passes.facts import EMPTY, shape_of
from mokfx.passes.groups import group_size
from mokfx.passes.rules.table import Call, rule
from mokfx.passes.terms import (
    Size,
    Term,
    at,
    count,
    integer,
    lin,
    peer,
    perm,
    product,
    quotient,
    rebuild,
    substitute,
    swap,
)
from mokfx.passes.value import Value, axis_of, position, reshape


@rule("_c10d_functional.wait_tensor")
def wait(call: Call) -> Value:
    return call.value("tensor")


@rule("_c10d_functional.all_to_all_single", "_c10d_functional_autograd.all_to_all_single")
def all_to_all(call: Call) -> Value | None:
    group = call["group_name"]
    ranks = group_size(group)
    if ranks is None:
        return None
    value = call.value("input")
    out_splits, in_splits = list(call["output_split_sizes"]), list(call["input_split_sizes"])
    if _equal(out_splits) and _equal(in_splits):
        return equal_exchange(call, value, group, ranks)
    return uneven_exchange(call, value, group, ranks, out_splits, in_splits)


@rule("_c10d_functional.all_gather_into_tensor")
def all_gather(call: Call) -> Value | None:
    """Everybody's counts: block s is what rank s has."""
    group, value = call["group_name"], call.value("input")
    ranks = group_size(group)
    body = value.body
    experts = None if body.op != "count" else quotient(product(shape_of(call["input"])), ranks or 0)
    if ranks is None or not isinstance(experts, int):
        return None
    source = axis_of(ranks)
    gathered = peer(group, ranks, experts, position(source), body)
    first = value.axes[0] if value.axes else ()
    return Value(((*source, *first), *value.axes[1:]), gathered)


def _equal(splits: Sequence[Any]) -> bool:
    return not splits or all(isinstance(s, int) and s == splits[0] for s in splits)


def equal_exchange(call: Call, value: Value, group: str, ranks: int) -> Value | None:
    """Block d of the first dimension goes to rank d; block s comes from rank s."""
    size = shape_of(call["input"])[0]
    rest = quotient(size, ranks)
    if ranks == 1:
        return value
    if rest is None:
        return None
    split = reshape(value, (ranks, rest, *shape_of(call["input"])[1:]))
    if split is None:
        return None
    sender = axis_of(ranks)
    sent = substitute(split.body, split.bind(0, swap(group, ranks, position(sender))))
    body = received(sent, group, ranks, position(sender)) if call.is_float else across(sent, ("equal", group))
    if body is None:
        return None
    return reshape(Value((sender, *split.axes[1:]), body), call.shape)


def uneven_exchange(
    call: Call, value: Value, group: str, ranks: int, out_splits: Sequence[Any], in_splits: Sequence[Any]
) -> Value | None:
    """Rows sorted by expert go to the ranks that own the experts, or come back from there."""
    sends, receives = [call.facts.scalar(s) for s in in_splits], [call.facts.scalar(s) for s in out_splits]
    row = axis_of(call.shape[0])
    outward = _exchange(group, ranks, sends, receives)
    if outward is not None:
        where = perm(outward, False, position(row))
    else:
        outward = _exchange(group, ranks, receives, sends)
        if outward is None:
            return None
        where = perm(outward, True, position(row))
    body = substitute(across(value.body, outward), value.bind(0, where))
    return Value((row, *value.axes[1:]), body)


def _exchange(group: str, ranks: int, sends: Sequence[Term], receives: Sequence[Term]) -> Exchange | None:
    """The exchange that sends `sends[d]` rows to rank d and receives `receives[s]` from rank s, if these are counts."""
    counted = {t.args[0] for s in (*sends, *receives) for t in _parts(s) if t.op == "count"}
    if len(counted) != 1 or len(sends) != ranks or len(receives) != ranks:
        return None
    (keys,) = counted
    experts = sum(len(_parts(s)) for s in receives)
    if experts % ranks:
        return None
    local = experts // ranks
    for d in range(ranks):
        there = swap(group, ranks, integer(d))
        sent = lin((count(keys, integer(d * local + e)), 1) for e in range(local))
        received = lin((count(keys, lin([(there, local)], e)), 1) for e in range(local))
        if not _is_count(sends[d], sent, keys) or receives[d] is not received:
            return None
    return Exchange(group, ranks, local, keys)


def _is_count(number: Term, expected: Term, keys: Keys) -> bool:
    """Whether a number is the expected count; of no slots at all, every count is zero."""
    return number is expected or (number is integer(0) and any(EMPTY in _symbols(v.args[1]) for v in keys.variables))


def _symbols(size: Size) -> set[object]:
    return set() if isinstance(size, int) else set(size.free_symbols)


def _parts(term: Term) -> list[Term]:
    return [t for t, _ in term.args[1]] if term.op == "lin" else [term]


def across(term: Term, exchange: object) -> Term:
    """`term` on the other side of an exchange: tensors of this rank become another rank's, and back again."""
    done: dict[Term, Term] = {}

    def visit(node: Term) -> Term:
        if node not in done:
            if node.op == "at":
                leaf, away, *index = node.args
                crossed = away[:-1] if away and away[-1] == exchange else (*away, exchange)
                done[node] = at(leaf, crossed, *(visit(i) for i in index))
            else:
                done[node] = rebuild(node, visit)
        return done[node]

    return visit(term)
