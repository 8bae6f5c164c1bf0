"""What indices, indicators and numbers of rows mean, in words: where each row goes, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mokfx.passes.bijections import Exchange, Sort
from mokfx.passes.facts import Facts
from mokfx.passes.terms import Term, children_of, factors_of, terms_of


class IndexWords:
    """Says what integers mean; `is_ids` tells a tensor of expert ids."""

    def __init__(self, facts: Facts, is_ids: Callable[[Term], bool]) -> None:
        self.facts = facts
        self.is_ids = is_ids

    def of(self, term: Term) -> str:
        """What an index term means; "" where there are no words for it."""
        term = bare(term)
        op, args = term.op, term.args
        if op in ("int", "const"):
            return "zeros, to be filled" if args[0] == 0 else ""
        if self.is_ids(term):
            return "the expert of each slot"
        if op == "var":
            return "0, 1, 2, ..."
        if op == "perm":
            return _positions(term, self.facts)
        if op == "div" and bijections(term):
            return "the token of each row" + order_of(self.facts, args[0])
        if op == "mod" and args[0].op == "perm":
            return "which choice each row is" + order_of(self.facts, args[0])
        if op == "seg":
            return "the expert of each row, in expert order"
        if op == "mod" and args[0].op == "seg":
            return "which of this rank's experts each received row is for"
        if op == "sender":
            return "the rank that each received row came from"
        return self._indicator(term) or self._place(term) or numbers(term)

    def _indicator(self, term: Term) -> str:
        if term.op == "add":  # one indicator for each choice
            words = {self._indicator(part) for part in terms_of(term)}
            return words.pop() if len(words) == 1 else ""
        factors = factors_of(term)
        chosen = any(factor.op == "delta" and any(map(self.is_ids, factor.args)) for factor in factors)
        limited = any(factor.op == "lt" for factor in factors)
        numbers_compared = [arg for factor in factors if factor.op == "delta" for arg in factor.args]
        placed = any(_is_place(part) for number in numbers_compared for part in factors_of(number))
        if any(map(_is_place, factors)):
            return "each slot's place among the rows of its expert" + (", 0 if dropped" if limited else "")
        if not (chosen or limited or placed):
            return ""
        if placed:
            return "1 at each slot's expert and place, if it is within the capacity" if limited else (
                "1 at each slot's place among the rows of its expert"
            )
        if limited:
            return "1 where a slot chose the expert and is within its capacity" if chosen else (
                "1 where the place is within the capacity"
            )
        return "1 where a slot chose the expert, else 0"

    def _place(self, term: Term) -> str:
        if term.op == "running":
            return "how many slots up to this one chose the same expert"
        if term.op == "choose":
            return "each slot's place in the buckets of the experts, or one that is thrown away"
        parts = dict(term.args[1]) if term.op == "lin" else {}
        kinds = {part.op for part in parts}
        if kinds == {"running"}:
            return "how many earlier slots chose the same expert"
        if _is_place(term):
            received = any(isinstance(perm, Exchange) for part in parts for perm in part.perms)
            return f"each {'row' if received or 'var' in kinds else 'slot'}'s place among the rows of its expert"
        if any(map(self.is_ids, parts)) and "start" in kinds:
            return "each slot's place in the buckets of the experts"
        if kinds == {"block_start"}:
            return "how far each rank's rows move when they are grouped by expert"
        return ""


def bare(term: Term) -> Term:
    """A term without casts and the marks of a detached gradient or an unspecified number."""
    while term.op in ("cast", "detached"):
        term = term.args[0]
    return bare(term.args[1]) if term.op == "valid" and isinstance(term.args[1], Term) else term


def _is_place(term: Term) -> bool:
    """Whether a term is a row's number less the number of its expert's first row."""
    parts = dict(term.args[1]) if term.op == "lin" else {}
    ops = {part.op: factor for part, factor in parts.items()}
    return ops.get("start") == -1 and len(parts) == 2 and (ops.get("perm") == 1 or ops.get("var") == 1)


# -- the order of rows -------------------------------------------------------------------------------------------------


def bijections(term: Term) -> list[Term]:
    """The permutations that an index goes through, the last one first."""
    found: list[Term] = []
    todo = [term]
    while todo:
        node = todo.pop(0)
        if node.op == "perm":
            found.append(node)
        if node.op in ("perm", "div", "mod", "lin"):
            todo.extend(children_of(node))
    return found


def order_of(facts: Facts, *index: Term) -> str:
    """", in expert order", or the like."""
    perms = [perm for term in index for perm in bijections(term)]
    if not perms:
        return ""
    names = [(type(perm.args[0]), bool(perm.args[1])) for perm in perms]
    last = perms[-1]  # the one that the row's own number goes through
    expert = _expert_of(last, facts)
    received = any(kind is Exchange and not inverse for kind, inverse in names)
    if isinstance(last.args[0], Sort) and not last.args[1]:
        if expert is not None:
            return f", for {'local ' if received else ''}expert {expert}"
        return ", received, by local expert" if received else ", in expert order"
    if received:
        return ", as received from the ranks"
    return ", slot by slot" if last.args[1] else ""


def _expert_of(perm: Term, facts: Facts) -> str | None:
    """The expert whose part of the sorted rows this is; None of all rows."""
    position = perm.args[2]
    if position.op == "var":
        number = facts.size_term(position.args[1])
        return str(number.args[1]) if number.op == "count" and number.args[1].op == "int" else None
    if position.op == "lin":
        before = [term for term, _ in position.args[1] if term.op == "count"]
        return str(len(before)) if before else None
    return None


def _is_received(bijection: object) -> bool:
    return isinstance(bijection, Sort) and any(isinstance(perm, Exchange) for perm in bijection.body.perms)


def _positions(perm: Term, facts: Facts) -> str:
    bijection, inverse, _ = perm.args
    if isinstance(bijection, Exchange):
        return "the sender's row of each received row"
    if _is_received(bijection):
        return "where each received row went" if inverse else "the received row at each place, by local expert"
    if inverse:
        return "each slot's place in expert order"
    return "the slot at each place" + (order_of(facts, perm) or ", in expert order")


# -- numbers of rows ---------------------------------------------------------------------------------------------------


def numbers(term: Term) -> str:
    """What a count of rows, or the place where some begin or end, means."""
    if term.op == "count":
        return _count(*term.args)
    if term.op in ("start", "block_start"):
        return f"where the rows of each {'expert' if term.op == 'start' else 'rank and expert'} begin"
    if term.op == "sum":
        sums = {"slots of each expert": "rows for each rank", _SENT: "rows from each rank"}
        return sums.get(numbers(term.args[1]), "")
    parts = [part for part, _ in term.args[1]] if term.op == "lin" else list(terms_of(term))
    ops = {part.op for part in parts}
    if ops == {"count", "start"} or ops == {"count", "block_start"}:
        return f"where the rows of each {'expert' if 'start' in ops else 'rank and expert'} end"
    if ops == {"count"} and len(parts) > 1:
        return "rows from one rank" if any(_swapped(part.args[1]) for part in parts) else "a number of rows"
    return ""


_SENT = "rows that each rank sends to this rank's experts"


def _count(keys: Any, key: Term) -> str:
    if _swapped(key):
        return _SENT
    received = any(isinstance(perm, Exchange) for perm in keys.body.perms)
    of = f"{'received rows' if received else 'slots'} of"
    local = "local " if received else ""
    return f"{of} {local}expert {key}" if key.op == "int" else f"{of} each {local}expert"


def _swapped(term: Term) -> bool:
    return term.op == "swap" or any(_swapped(child) for child in children_of(term))
