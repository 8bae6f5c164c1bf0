"""The summands of a token's output: for each choice, or for each expert under the indicator that it was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from mokfx.passes.indicators import picks_once
from mokfx.passes.network import NotRecognised
from mokfx.passes.sums import open_sum
from mokfx.passes.terms import Term, integer, mul, parts_of, substitute, subterms, uncast


@dataclass
class Piece:
    """A summand over a choice; `expert` and `key` if it counts only where `key == expert`."""

    choice: Term
    body: Term
    expert: int | None = None
    key: Term | None = None


def pieces_of(term: Term, hidden: Term) -> list[Piece]:
    term = uncast(term)
    if term.op == "sum" and _is_choice(term, hidden):
        choice, body = open_sum(term)
    else:
        choice, body = _pulled_out(term)
    found: list[Piece] = []
    for part in _distributed(body):
        part = _once_per_choice(part, choice)
        indicators = [f for f in parts_of(part) if _indicator(f) is not None]
        if len(indicators) > 1:
            raise NotRecognised("a row is selected by more than one condition", 1)
        if indicators:
            rest = list(parts_of(part))
            rest.remove(indicators[0])
            expert, key = _indicator(indicators[0]) or (0, integer(0))
            found.append(Piece(choice, mul(rest), expert, key))
        else:
            found.append(Piece(choice, part))
    return found


def first_choice(term: Term) -> int:
    """The largest known number that a summand reads a tensor at, last: its choice."""
    elements = [t for t in subterms(term) if t.op == "at" and len(t.args) > 2 and t.args[-1].op == "int"]
    return max((int(t.args[-1].args[0]) for t in elements), default=0)


def _is_choice(term: Term, hidden: Term) -> bool:
    """Whether a sum is over a token's choices, and not the inner dimension of the last projection."""
    variable, body = term.args
    elements = [uncast(f) for f in parts_of(body)]
    # A weight has it as a dimension; what is read at the id of a choice has it inside of an index.
    return not any(
        f.op == "at" and hidden in f.free and any(variable in atoms(index) for index in f.args[2:]) for f in elements
    )


def _pulled_out(term: Term) -> tuple[Term, Term]:
    """`(sum_j [id_j = e] w_j) * f` as the sum over j that it is."""
    parts = list(parts_of(term))
    for i, factor in enumerate(parts):
        inner = uncast(factor)
        if inner.op == "sum" and any(_indicator(f) is not None for f in parts_of(inner.args[1])):
            choice, body = open_sum(inner)
            return choice, mul([body, *parts[:i], *parts[i + 1 :]])
    return integer(0), term


def _once_per_choice(part: Term, choice: Term) -> Term:
    """`[id_j = e] * sum_i [id_i = e] w_i` is `[id_j = e] * w_j` where a token's choices differ."""
    parts = list(parts_of(part))
    wanted = [f for f in parts if _indicator(f) is not None]
    if not wanted or choice.op != "var":
        return part
    for i, factor in enumerate(parts):
        inner = uncast(factor)
        if inner.op != "sum" or factor in wanted:
            continue
        bound_variable, body = inner.args
        replaced = substitute(body, {bound_variable: choice})
        if wanted[0] in parts_of(replaced) and picks_once(wanted[0]):
            rest = list(parts_of(replaced))
            rest.remove(wanted[0])
            return mul([*parts[:i], *rest, *parts[i + 1 :]])
    return part


def _distributed(term: Term) -> list[Term]:
    """A product over a sum of selected rows, multiplied out."""
    parts = list(parts_of(term))
    for i, factor in enumerate(parts):
        inner = uncast(factor)
        if inner.op == "add" and any(_indicator(f) is not None for t in inner.args for f in parts_of(t)):
            rest = [*parts[:i], *parts[i + 1 :]]
            return [p for t in inner.args for p in _distributed(mul([t, *rest]))]
    return [mul(parts)] if term.op != "mul" else [term]


def _indicator(term: Term) -> tuple[int, Term] | None:
    """`(e, key)` for the indicator that a key is the known expert e."""
    if term.op != "delta":
        return None
    for number, key in (term.args, reversed(term.args)):
        if number.op == "int" and isinstance(number.args[0], int):
            return number.args[0], key
    return None


def atoms(term: Term) -> list[Term]:
    if term.op in ("lin",):
        return [a for t, _ in term.args[1] for a in atoms(t)]
    if term.op in ("div", "mod"):
        return atoms(term.args[0])
    return [term]
