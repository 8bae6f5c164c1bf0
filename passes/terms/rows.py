"""Rows in order of their expert: the sorted sequence, counts, where a segment starts, who sent a row."""

from __future__ import annotations

from typing import Any

from mokfx.passes.terms.index import bound, integer, lin, mod, on_index, on_parts, perm, plus, swap
from mokfx.passes.terms.sizes import Size, _plain, at_most
from mokfx.passes.terms.term import Term, make


def _gather_sources(total: dict[Term, Size]) -> None:
    """Counts that all ranks send to one local expert become one count of the rows received for it."""
    by_expert: dict[tuple[Any, Term], dict[int, Term]] = {}
    for term in total:
        if term.op == "count" and isinstance(term.args[1], Term):
            received = received_from(term)
            if received is not None and received[1].op == "int":
                exchange, source, local = received
                by_expert.setdefault((exchange, local), {})[source.args[0]] = term
    for (exchange, local), terms in by_expert.items():
        if len(terms) == exchange.ranks and len({total[t] for t in terms.values()}) == 1:
            factor = total[next(iter(terms.values()))]
            for term in terms.values():
                del total[term]
            whole = count(exchange.local_keys, local)
            total[whole] = _plain(total.get(whole, 0) + factor)


def _gather_columns(total: dict[Term, Size]) -> None:
    """A running count of second choices, and how many first choices there are, is a running count of both."""
    for term in [t for t in total if t.op == "running"]:
        from mokfx.passes.queues import behind

        whole = behind(term)
        if whole is not None and all(total.get(first) == total[term] for first in whole.before):
            factor = total.pop(term)
            for first in whole.before:
                del total[first]
            total[whole.running] = _plain(total.get(whole.running, 0) + factor)


def seg(keys: Any, position: Term) -> Term:
    """The `position`-th smallest of `keys`: the same for every way of sorting them."""
    if position.op == "perm":
        bijection, inverse, inner = position.args
        if inverse and getattr(bijection, "keys", None) == keys:
            key: Term = bijection.key_at(inner)
            return key
    return make("seg", keys, position)


def fold_sorted(term: Term) -> Term:
    """A key read through the order that sorts it is the sorted sequence, whatever the order's ties."""
    for bijection in term.perms:
        if hasattr(bijection, "position_of") and bijection.body.op == term.op:
            position = bijection.position_of(term)
            if position is not None and position.op == "perm" and position.args[:2] == (bijection, False):
                return seg(bijection.keys, position.args[2])
    return term


def fold_local(term: Term) -> Term:
    """A received row's expert less this rank's first expert is its local expert."""
    if term.op == "lin" and len(term.args[1]) == 1 and term.args[1][0][1] == 1:
        return local_expert(term.args[1][0][0], -term.args[0]) or term
    return term


def local_expert(term: Term, less: Size) -> Term | None:
    """`term - less` as a local expert, if `term` is a received row's expert and `less` this rank's first expert."""
    if term.op == "seg" and term.args[1].op == "perm":
        exchange, inverse, _ = term.args[1].args
        received = not inverse and getattr(exchange, "keys_sent", None) == term.args[0]
        if received and exchange.first_expert is not None and less == exchange.first_expert:
            return mod(term, exchange.local_experts)
    return None


def fold_regrouped(term: Term) -> Term:
    """A row's place in its segment, counted from where the segment starts in the other order, is its row there."""
    if term.op != "lin" or term.args[0] != 0 or len(term.args[1]) != 3:
        return term
    starts = {c: t for t, c in term.args[1] if t.op == "block_start"}
    rows = [t for t, c in term.args[1] if t.op != "block_start" and c == 1]
    if set(starts) != {1, -1} or len(rows) != 1:
        return term
    to, origin, row = starts[1], starts[-1], rows[0]
    exchange, grouped, source, local = origin.args
    if to.args != (exchange, not grouped, source, local):
        return term
    arrived = perm(exchange.by_expert, False, row) if grouped else row
    if exchange.segment_of(arrived) != (source, local):
        return term
    return perm(exchange.by_expert, not grouped, row)


def block_start(exchange: Any, grouped: bool, source: Term, local: Term) -> Term:
    """The first received row of segment (source rank, local expert): as rows arrive, or grouped by expert."""
    if source.op == local.op == "int":
        segments = exchange.segment_order()[grouped]
        before = segments[: segments.index((source.args[0], local.args[0]))]
        return lin((exchange.count_from(integer(s), integer(e)), 1) for s, e in before)
    return make("block_start", exchange, grouped, source, local)


def sender(exchange: Any, row: Term) -> Term:
    """The rank that a received row came from."""
    return make("sender", exchange, row)


def peer(group: str, ranks: int, local_experts: int, source: Term, term: Term) -> Term:
    """What `term`, a count of rows, is on rank `source`; for an expert of this rank it is a count of rows sent here."""
    from mokfx.passes.groups import group_rank

    rank = group_rank(group)
    if rank is not None and term.op == "count":
        own = lin([(term.args[1], 1)], -rank * local_experts)
        limit = bound(own)
        if limit is not None and at_most(limit, local_experts):
            return count(term.args[0], lin([(swap(group, ranks, source), local_experts), (own, 1)]))
    return make("peer", group, ranks, local_experts, source, term)


def count(keys: Any, key: Term) -> Term:
    """How many of `keys` equal `key`."""
    return make("count", keys, key)


def start(keys: Any, key: Term) -> Term:
    """How many of `keys` are smaller than `key`; for a known key the sum of the counts before it."""
    if key.op == "int" and isinstance(key.args[0], int):
        return lin((count(keys, integer(e)), 1) for e in range(key.args[0]))
    if key.op == "lin" and isinstance(key.args[0], int) and key.args[0] > 0:
        before = lin([(key, 1)], -1)
        return plus(start(keys, before), count(keys, before))
    return make("start", keys, key)


def running(order: Any, key: Term, position: Term) -> Term:
    """How many keys equal `key` at positions up to and including `position`, in the order before a stable sort."""
    from mokfx.passes.queues import behind

    if order.key_at(position) is key:
        return lin([(perm(order, True, position), 1), (start(order.keys, key), -1)], 1)
    term = make("running", order, key, position)
    whole = behind(term)
    return term if whole is None or whole.before else whole.running


def received_from(term: Term) -> tuple[Any, Term, Term] | None:
    """`(exchange, source rank, local expert)` if `term` counts what one rank sends to an expert of this rank."""
    from mokfx.passes.bijections import Exchange

    key = term.args[1]
    parts = dict(key.args[1]) if key.op == "lin" else {key: 1}
    swaps = [t for t in parts if t.op == "swap"]
    if len(swaps) != 1:
        return None
    group, ranks, source = swaps[0].args
    local_experts = parts.pop(swaps[0])
    local = lin(parts.items(), key.args[0] if key.op == "lin" else 0)
    limit = bound(local)
    if not isinstance(local_experts, int) or limit is None or not at_most(limit, local_experts):
        return None
    return Exchange(group, ranks, local_experts, term.args[0]), source, local


on_parts += [_gather_sources, _gather_columns]
on_index += [fold_sorted, fold_local, fold_regrouped]
