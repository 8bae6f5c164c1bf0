"""Tests that ask whether there are rows, as a condition that Dynamo must decide and as a line of source."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import sympy


def rows_asked(question: sympy.Basic) -> tuple[sympy.Basic, bool] | None:
    """(size, answer if size >= 1) for a condition such as Eq(size, 0), size > 0, size >= 1; None for any
    other."""
    if isinstance(question, sympy.Not):
        asked = rows_asked(question.args[0])
        return (asked[0], not asked[1]) if asked else None
    if not isinstance(question, sympy.core.relational.Relational):
        return None
    if question.lhs.is_number and not question.rhs.is_number:
        question = question.reversed
    size, bound = question.lhs, question.rhs
    match question:
        case sympy.Eq() | sympy.Ne() if bound == 0:
            return size, isinstance(question, sympy.Ne)
        case sympy.StrictGreaterThan() if bound == 0:
            return size, True
        case sympy.LessThan() if bound == 0:
            return size, False
        case sympy.GreaterThan() if bound == 1:
            return size, True
        case sympy.StrictLessThan() if bound == 1:
            return size, False
    return None


@dataclass(frozen=True)
class EmptyTest:
    """`if` written as a test for rows: what it measures, and its branches by meaning."""

    subject: ast.expr
    empty: list[ast.stmt]
    """The branch for no rows ([] if there is none)."""
    filled: list[ast.stmt]
    """The branch for rows ([] if there is none)."""

    @property
    def count(self) -> str:
        """The name of the number tested (`n` in `n == 0`), "" for anything but a plain name."""
        return self.subject.id if isinstance(self.subject, ast.Name) else ""


def empty_test(statement: ast.If) -> EmptyTest | None:
    """Reads `if n == 0`, `if not n`, `if n > 0`, `if 1 > n`, ...; None if the condition is another one."""
    test, flipped = statement.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, flipped = test.operand, not flipped
    subject, when_empty = _measured(test)
    if subject is None:
        return None
    if when_empty != flipped:
        return EmptyTest(subject, statement.body, statement.orelse)
    return EmptyTest(subject, statement.orelse, statement.body)


_MIRRORED = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}
_TRUE_IF_EMPTY = {(ast.Eq, 0): True, (ast.LtE, 0): True, (ast.Lt, 1): True}
_TRUE_IF_FILLED = {(ast.NotEq, 0): False, (ast.Gt, 0): False, (ast.GtE, 1): False}
_MEANING = _TRUE_IF_EMPTY | _TRUE_IF_FILLED


def _measured(test: ast.expr) -> tuple[ast.expr | None, bool]:
    """(what is measured, whether the test is true when that is 0)."""
    if not isinstance(test, ast.Compare):
        return test, False
    if len(test.ops) != 1:
        return None, False
    left, operator, right = test.left, type(test.ops[0]), test.comparators[0]
    if isinstance(left, ast.Constant) and operator in _MIRRORED:
        left, operator, right = right, _MIRRORED[operator], left
    if not isinstance(right, ast.Constant):
        return None, False
    meaning = _MEANING.get((operator, right.value)) if type(right.value) is int else None
    return (None, False) if meaning is None else (left, meaning)
