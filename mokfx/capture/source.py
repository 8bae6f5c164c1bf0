"""From a bytecode instruction back to the statement that it belongs to."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass
from dis import Positions
from functools import lru_cache
from types import CodeType


@dataclass(frozen=True)
class Site:
    """A place in the user's source."""

    filename: str
    line: int

    @property
    def where(self) -> str:
        """`file.py:line`, as the report prints it."""
        return f"{os.path.basename(self.filename)}:{self.line}"

    @property
    def code(self) -> str:
        return linecache.getline(self.filename, self.line).strip()


@dataclass(frozen=True)
class Lines:
    """A run of lines of one file, both ends included."""

    filename: str
    first: int
    last: int

    def holds(self, filename: str, line: int) -> bool:
        return filename == self.filename and self.first <= line <= self.last


def lines_of(filename: str, body: list[ast.stmt]) -> Lines:
    return Lines(filename, body[0].lineno, body[-1].end_lineno or body[-1].lineno)


@dataclass(frozen=True)
class Function:
    """The syntax tree of the function that a code object came from."""

    filename: str
    tree: ast.FunctionDef

    def find_if(self, at: Positions) -> ast.If | None:
        """The `if` whose whole condition is tested by the jump at `at`; None for a part of one (`a and
        b`)."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If):
                test = node.test
                while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                    if _span(test) == _span(at):
                        return node
                    test = test.operand
                # Python 3.11 gives the jump of `if not x` the span of the whole statement.
                if _span(test) == _span(at) or (test is not node.test and _span(node) == _span(at)):
                    return node
        return None

    def find_loop(self, at: Positions) -> ast.For | None:
        """The `for` that iterates over what the instruction at `at` makes, directly or through one local
        name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.For) and (_span(node) == _span(at) or _within(at, node.iter)):
                return node
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and _within(at, node.value):
                target = node.targets[0]
                loops = [
                    loop
                    for loop in ast.walk(self.tree)
                    if isinstance(loop, ast.For)
                    and isinstance(loop.iter, ast.Name)
                    and isinstance(target, ast.Name)
                    and loop.iter.id == target.id
                ]
                return loops[0] if len(loops) == 1 else None
        return None

    def loop_around(self, statement: ast.stmt) -> tuple[ast.For | None, list[ast.stmt]]:
        """The innermost `for` around a statement, and the statements that follow it there, to the end of the
        loop's body (of the function's, without a loop). ([] too if the statement is nested in something
        else.)"""
        for owner in ast.walk(self.tree):
            if isinstance(owner, ast.For | ast.FunctionDef) and statement in owner.body:
                rest = owner.body[owner.body.index(statement) + 1 :]
                return (owner if isinstance(owner, ast.For) else None), rest
        return None, []

    def loads(self, name: str, outside: list[ast.stmt] = []) -> list[ast.Name]:  # noqa: B006 (never changed)
        """Where a name is read, leaving out the statements in `outside`."""
        skip = {id(node) for statement in outside for node in ast.walk(statement)}
        return [node for node in names(self.tree, ast.Load) if node.id == name and id(node) not in skip]

    def values(self, name: str) -> list[tuple[ast.stmt, ast.expr]]:
        """The plain assignments to a name, each with its value: `a = 1`, and `a, b = 1, 2` too."""
        found: list[tuple[ast.stmt, ast.expr]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                pairs: list[tuple[ast.expr, ast.expr]] = [(node.target, node.value)]
            elif isinstance(node, ast.Assign):
                pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            else:
                continue
            found += [
                (node, value) for target, value in pairs if isinstance(target, ast.Name) and target.id == name
            ]
        return found

    def stores(self, name: str) -> list[ast.Name]:
        return [node for node in names(self.tree, ast.Store) if node.id == name]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def names(tree: ast.AST, context: type[ast.expr_context]) -> Iterator[ast.Name]:
    """Each name that is read (ast.Load) or set (ast.Store) in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node


def function_of(code: CodeType) -> Function | None:
    """The function a code object was compiled from; None if its source is not at hand (exec, a lambda, a
    comprehension)."""
    tree = _parse(code.co_filename)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return Function(code.co_filename, node)
    return None


@lru_cache(maxsize=64)
def _parse(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


Span = tuple[int | None, int | None, int | None, int | None]


def _span(at: ast.AST | Positions) -> Span:
    get = (
        (lambda name: getattr(at, name, None))
        if isinstance(at, ast.AST)
        else (lambda name: getattr(at, name))
    )
    return get("lineno"), get("col_offset"), get("end_lineno"), get("end_col_offset")


def _within(at: Positions, node: ast.expr) -> bool:
    line, column, end_line, end_column = _span(at)
    first, first_column, last, last_column = _span(node)
    if None in (line, column, end_line, end_column):
        return False
    return (first, first_column) <= (line, column) and (end_line, end_column) <= (last, last_column)
