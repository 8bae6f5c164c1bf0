"""One term for what several terms say of one expert each: `f(0), f(1), ...` becomes `f(e)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from mokfx.passes.terms import (
    Term,
    add,
    at,
    delta,
    integer,
    lin,
    make,
    minus,
    mul,
    plus,
    rebuild,
    start,
)
from mokfx.passes.value import Leaf, Stack

POSITIONS = frozenset(("var", "int", "lin", "count"))


def generalise(parts: Sequence[Term], index: Term) -> Term | None:
    """A term whose value for `index = i` is `parts[i]`, or None: the parts differ in more than the expert."""
    first = parts[0]
    if all(part is first for part in parts):
        return first
    if all(part.op in POSITIONS for part in parts):
        position = _affine(parts, index) or _starts(parts, index)
        if position is not None:
            return position
    if any(part.op != first.op or len(part.args) != len(first.args) for part in parts):
        return _constants(parts, index)
    op = first.op
    if op == "int":
        return _constants(parts, index)
    if op == "lin":
        return _sums(parts, index)
    if op == "at":
        return _elements(parts, index)
    if op in ("mul", "add", "delta"):
        columns = zip(*(sorted(part.args, key=_shape_of) for part in parts), strict=True)
        joined = [generalise(column, index) for column in columns]
        known = [term for term in joined if term is not None]
        if len(known) < len(joined):
            return None
        return delta(*known) if op == "delta" else (mul if op == "mul" else add)(known)
    children: list[Any] = []
    for column in zip(*(part.args for part in parts), strict=True):
        if isinstance(column[0], Term):
            term = generalise(column, index)
            if term is None:
                return None
            children.append(term)
        elif any(item != column[0] for item in column):
            return None
        else:
            children.append(column[0])
    if op == "sum":
        return make("sum", *children)
    if op in ("const", "var"):
        return None
    template = make(op, *children)
    return rebuild(template, lambda child: child)


def _constants(parts: Sequence[Term], index: Term) -> Term | None:
    if any(part.op != "int" or not isinstance(part.args[0], int) for part in parts):
        return None
    values = [part.args[0] for part in parts]
    step = values[1] - values[0]
    if step == 0 or any(v != values[0] + i * step for i, v in enumerate(values)):
        return None
    return lin([(index, step)], values[0])


def _affine(parts: Sequence[Term], index: Term) -> Term | None:
    """Positions that differ by a fixed step: `X, X + s, X + 2s, ...`, whatever X is."""
    gaps = [minus(part, parts[0]) for part in parts]
    if any(gap.op != "int" for gap in gaps):
        return None
    step = gaps[1].args[0]
    if any(lin([(integer(step), i)]) is not gap for i, gap in enumerate(gaps)):
        return None
    return lin([(parts[0], 1), (index, step)])


def _sums(parts: Sequence[Term], index: Term) -> Term | None:
    constant = generalise([integer(part.args[0]) for part in parts], index)
    ordered = [sorted(part.args[1], key=lambda p: (str(p[1]), _shape_of(p[0]))) for part in parts]
    columns = list(zip(*ordered, strict=False))
    if constant is None or any(len(part.args[1]) != len(columns) for part in parts):
        return None
    total = [(constant, 1)]
    for column in columns:
        term = generalise([t for t, _ in column], index)
        if term is None or any(c != column[0][1] for _, c in column):
            return None
        total.append((term, column[0][1]))
    return lin(total)


def _starts(parts: Sequence[Term], index: Term) -> Term | None:
    """`X, X + count(0), X + count(0) + count(1), ...` is `X + start(index)`."""
    atoms = [t for part in parts for t in (dict(part.args[1]) if part.op == "lin" else (part,))]
    for keys in {t.args[0] for t in atoms if t.op == "count"}:
        rest = {minus(part, start(keys, integer(e))) for e, part in enumerate(parts)}
        if len(rest) == 1:
            return plus(rest.pop(), start(keys, index))
    return None


def _elements(parts: Sequence[Term], index: Term) -> Term | None:
    leaves = [part.args[0] for part in parts]
    away = _marks([part.args[1] for part in parts], index)
    if away is None:
        return None
    position: list[Term] = []
    for column in zip(*(part.args[2:] for part in parts), strict=True):
        term = generalise(column, index)
        if term is None:
            return None
        position.append(term)
    if all(leaf is leaves[0] for leaf in leaves):
        return at(leaves[0], away, *position)
    if len(set(map(id, leaves))) != len(leaves) or not all(isinstance(leaf, Leaf) for leaf in leaves):
        return None
    shapes = {(tuple(leaf.tensor.shape), leaf.tensor.dtype, leaf.tensor.stride()) for leaf in leaves}
    if len(shapes) != 1:
        return None
    return at(_stack(tuple(leaves)), away, index, *position)


def _marks(parts: Sequence[Any], index: Term) -> Any:
    """The common mark of elements of other ranks, the ranks that it names generalised."""
    first = parts[0]
    if all(part == first for part in parts):
        return first
    if isinstance(first, Term):
        return generalise(parts, index)
    if not isinstance(first, tuple) or any(len(part) != len(first) for part in parts):
        return None
    joined = [_marks(column, index) for column in zip(*parts, strict=True)]
    return None if None in joined else tuple(joined)


_stacks: WeakValueDictionary[tuple[Leaf, ...], Stack] = WeakValueDictionary()
"""One stack for equal leaves, as long as a term reads it."""


def _stack(leaves: tuple[Leaf, ...]) -> Stack:
    known = _stacks.get(leaves)
    if known is None:
        known = _stacks[leaves] = Stack(leaves)
    return known


def _shape_of(term: Term) -> str:
    """A term without what differs between experts, for putting the parts of a product in one order."""
    if term.op == "at":
        leaf = term.args[0]
        shape = tuple(getattr(getattr(leaf, "tensor", None), "shape", ()))
        return f"at{shape}({','.join(map(_shape_of, term.args[2:]))})"
    if term.op == "int":
        return "#"
    if term.op in ("lin", "var"):
        return term.op
    if term.op in ("mul", "add"):
        return f"{term.op}({','.join(sorted(map(_shape_of, term.args)))})"
    return f"{term.op}({','.join(_shape_of(a) if isinstance(a, Term) else str(a) for a in term.args)})"
