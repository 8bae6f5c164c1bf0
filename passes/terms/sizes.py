"""Sizes of dimensions: integers, or sympy expressions that are compared without adding guards."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr


def as_size(value: Any) -> Size:
    """A dimension's size as an int or, if it is symbolic, its sympy expression."""
    node = getattr(value, "node", None)
    expr = node.shape_env.replace(node.expr) if node is not None and node.shape_env is not None else value
    return int(expr) if isinstance(expr, int | sympy.Integer) else expr


def product(sizes: Iterable[Size]) -> Size:
    return _plain(reduce(lambda a, b: a * b, sizes, 1))


def _plain(size: Any) -> Size:
    return int(size) if isinstance(size, int | sympy.Integer) else size


def quotient(size: Size, by: Size) -> Size | None:
    """`size / by` if it is known to be a whole number."""
    if by == 0:
        return None
    if isinstance(size, int) and isinstance(by, int):
        return size // by if size % by == 0 else None
    ratio = sympy.cancel(sympy.sympify(size) / by)
    whole = ratio.is_integer and not any(isinstance(a, sympy.Pow) and a.exp.is_negative for a in ratio.atoms(sympy.Pow))
    return _plain(ratio) if whole else None


def at_most(size: Size, limit: Size) -> bool:
    """Whether `size <= limit` is known without asking the shape environment to guard on it."""
    gap = _plain(sympy.expand(limit - size)) if not isinstance(limit - size, int) else limit - size
    return gap >= 0 if isinstance(gap, int) else bool(gap.is_nonnegative)
