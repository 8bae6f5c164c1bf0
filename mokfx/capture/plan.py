"""Deciding, from the source alone, whether a speculation can be proven at all: what to check, or why not."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from mokfx.capture.effects import Effects, effects_of
from mokfx.capture.emptiness import EmptyTest
from mokfx.capture.source import Function

HIT_LISTS = {"nonzero", "where", "argwhere"}
ROW_VIEWS = {
    "flatten",
    "squeeze",
    "view",
    "reshape",
    "ravel",
    "unbind",
    "cpu",
    "to",
    "long",
    "int",
    "detach",
}
SUMS = {"sum", "mean"}
DUMMIES = {"new_zeros", "new_ones", "zeros_like", "ones_like"} | SUMS


class Refused(Exception):
    """Why a line was left to plain Dynamo: one clause, for "... was not captured: <clause>"."""


@dataclass
class Plan:
    """What must hold for a speculation to be exact, besides its marker's absorption by the pass."""

    effects: list[Effects] = field(default_factory=list)
    same_as: str = ""
    """The name of the tensor that the empty branch returns or sets: it must be like what the other branch
    gives."""
    result: str = ""
    """The name that both branches set, "return" for the function's result, "" if the branches give no
    value."""
    floating: tuple[str, ...] = ()
    """Names that must be floating-point tensors: a sum of their rows keeps their dtype only then."""


def plan_loop(fn: Function, loop: ast.For) -> Plan:
    """For `for e in hit.nonzero(): ...`, run for every expert. Raises Refused."""
    if loop.orelse:
        raise Refused("the loop has an `else`")
    if not _lists_rows(fn, loop.iter):
        raise Refused(
            f"`{ast.unparse(loop.iter)}` is not just the list of the experts that were hit, read here alone"
        )
    return Plan([_harmless(effects_of(fn, loop.body, loop=loop))])


def plan_branch(fn: Function, statement: ast.If, test: EmptyTest) -> Plan:
    """For `if <no rows>: ...`, taken as if there were rows. Raises Refused."""
    empty = [s for s in test.empty if not isinstance(s, ast.Pass)]
    match empty:
        case []:
            return Plan([_harmless(effects_of(fn, test.filled, count=test.count))])
        case [ast.Continue()]:
            loop, rest = fn.loop_around(statement)
            if loop is None:
                raise Refused("`continue` is not directly in the body of the loop")
            parts = [part for part in (test.filled, rest) if part]
            return Plan([_harmless(effects_of(fn, part, count=test.count)) for part in parts])
        case [ast.Return(value=ast.expr() as value)]:
            loop, rest = fn.loop_around(statement)
            parts = [part for part in (test.filled, rest) if part]
            if loop is not None or not parts:
                raise Refused("`return` is not directly in the body of the function")
            plan = Plan([_harmless(effects_of(fn, part, returns=True)) for part in parts], result="return")
            plan.same_as = _like(value)
            return plan
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
            plan = Plan(
                [_harmless(_without(effects_of(fn, test.filled, count=test.count), name))], result=name
            )
            if len(fn.stores(name)) != 2 or not (sets := _final_value(test.filled, name)):
                raise Refused(f"`{name}` is not set once in each branch")
            if _same_call_of_no_rows(value, sets):
                plan.floating = tuple(_summed(value))
            else:
                plan.same_as = _like(value)
            return plan
    first = ast.unparse(empty[0]).splitlines()[0]
    raise Refused(f"without rows it runs `{first}`, which may not be what a layer without rows does")


def _harmless(effects: Effects) -> Effects:
    if effects.problems:
        line, text = effects.problems[0]
        raise Refused(f"line {line}: {text}")
    return effects


def _without(effects: Effects, name: str) -> Effects:
    """The branches' common name is checked by its value, not as something that must not be set."""
    effects.problems = [p for p in effects.problems if p[1] != f"`{name}` is set here and read elsewhere"]
    return effects


def _lists_rows(fn: Function, value: ast.expr) -> bool:
    """Whether an iterable is the list of hit experts itself: no enumerate or zip, whose counters would count
    only the experts that were hit, and no name that is read elsewhere too (its length, say)."""
    match value:
        case ast.Call(func=ast.Attribute(attr=method)) if method in HIT_LISTS:
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr="tolist")):
            return _is_vector(fn, inner) and _lists_rows(fn, inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in ROW_VIEWS:
            return _lists_rows(fn, inner)
        case ast.Subscript(value=inner, slice=ast.Constant(value=0)):
            return _lists_rows(fn, inner)
        case ast.Name(id=name):
            values = fn.values(name)
            read_here_alone = len(values) == len(fn.stores(name)) == len(fn.loads(name)) == 1
            return read_here_alone and _lists_rows(fn, values[0][1])
    return False


def _is_vector(fn: Function, value: ast.expr) -> bool:
    """Whether a list of hits is surely [n], not [n, 1]: Dynamo does not end when it makes a nested list of
    one."""
    match value:
        case ast.Call(func=ast.Attribute(attr="flatten" | "squeeze" | "ravel" | "view" | "reshape")):
            return True
        case ast.Call(func=ast.Attribute(value=inner)):
            return _is_vector(fn, inner)
        case ast.Subscript():
            return True
        case ast.Name(id=name):
            values = fn.values(name)
            return len(values) == 1 and _is_vector(fn, values[0][1])
    return False


def _like(value: ast.expr) -> str:
    """The name whose rows a value has (none): `x`, `x[:0]`, `torch.zeros_like(x)`, `x.new_zeros(x.shape)`,
    `x.clone()`."""
    match value:
        case ast.Name(id=name):
            return name
        case ast.Subscript(
            value=ast.Name(id=name), slice=ast.Slice(lower=None, upper=ast.Constant(value=0), step=None)
        ):
            return name
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="zeros_like" | "empty_like"),
            args=[ast.Name(id=name)],
            keywords=[],
        ):
            return name
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="new_zeros" | "new_empty"),
            args=[ast.Attribute(value=ast.Name(id=other), attr="shape")],
            keywords=[],
        ) if name == other:
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="clone"), args=[], keywords=[]):
            return name
    raise Refused(
        f"without rows it gives `{ast.unparse(value)}`, which I cannot compare with the other branch's value"
    )


def _final_value(body: list[ast.stmt], name: str) -> ast.expr | None:
    last = body[-1] if body else None
    return last.value if isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == name else None


def _same_call_of_no_rows(value: ast.expr, other: ast.expr) -> bool:
    """`f(one row made of each argument)[:0]` beside `f(arguments)`: the same call for a dummy row, and none
    of its rows."""
    match value, other:
        case (
            ast.Subscript(
                value=ast.Call(func=made_by, args=dummies, keywords=[]),
                slice=ast.Slice(lower=None, upper=ast.Constant(value=0), step=None),
            ),
            ast.Call(func=called, args=arguments, keywords=[]),
        ):
            return (
                ast.dump(made_by) == ast.dump(called)
                and len(dummies) == len(arguments)
                and all(_dummy_of(d, a) for d, a in zip(dummies, arguments, strict=True))
            )
    return False


def _summed(value: ast.expr) -> list[str]:
    calls = [
        node
        for node in ast.walk(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return [
        ast.unparse(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in SUMS
    ]


def _dummy_of(dummy: ast.expr, argument: ast.expr) -> bool:
    match dummy:
        case ast.Call(func=ast.Attribute(value=source, attr=method)) if method in DUMMIES:
            if ast.unparse(source) == "torch":
                source = dummy.args[0]
            return ast.dump(source) == ast.dump(argument) and not any(
                k.arg == "dtype" for k in dummy.keywords
            )
    return ast.dump(dummy) == ast.dump(argument)
