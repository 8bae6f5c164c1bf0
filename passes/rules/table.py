"""The table of rules: for each ATen op, how the facts of its inputs give the fact of its output.

A rule takes a `Call` and returns the output's fact (a list of facts for several outputs), or None if it does not know:
then the output is taken as given, and a near miss can name the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mokfx.passes.facts import Facts, shape_of
from mokfx.passes.terms import Size, Term, const, integer
from mokfx.passes.value import Value

if TYPE_CHECKING:
    from mokfx.passes.interpret import Tracker

Result: TypeAlias = Value | Sequence[Value | None] | None
Rule: TypeAlias = "Callable[[Call], Result]"
WriteBack: TypeAlias = "Callable[[Call, Value, Value], Value | None]"

RULES: dict[str, Rule] = {}
WRITES: dict[str, WriteBack] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops by name ("aten.view"); an in-place `view_` uses the rule of `view`."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def write_back(*names: str) -> Callable[[WriteBack], WriteBack]:
    """Register how a change of a view made by these ops changes the tensor that it is a view of."""

    def register(function: WriteBack) -> WriteBack:
        WRITES.update(dict.fromkeys(names, function))
        return function

    return register


class Call:
    """One ATen call: its arguments by name, their facts, and its output on fake tensors."""

    def __init__(self, tracker: Tracker, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        self.tracker = tracker
        self.func = func
        name = func._schema.name.split("::")[1]
        in_place = name.endswith("_") and not name.startswith("__")
        self.name = f"{func.namespace}.{name.removesuffix('_') if in_place else name}"
        """The op's name, that of the functional op for an in-place one."""
        schema = func._schema.arguments
        self.arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
        self.arguments |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        self.out = out

    @property
    def facts(self) -> Facts:
        return self.tracker.facts

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def value(self, argument: Any) -> Value:
        """The fact about a tensor or number; a tensor without one is taken as given."""
        if isinstance(argument, str):
            argument = self[argument]
        if isinstance(argument, torch.Tensor):
            return self.tracker.value(argument)
        if isinstance(argument, float) and not argument.is_integer():
            return Value((), const(argument))
        if isinstance(argument, bool | float):
            return Value((), const(float(argument)))
        return Value((), self.facts.scalar(argument))

    def dim(self, argument: Any, rank: int | None = None) -> int:
        """A dimension counted from the front."""
        number: int = self[argument] if isinstance(argument, str) else argument
        rank = rank if rank is not None else len(self.value("self").axes)
        return number + rank if number < 0 else number

    @property
    def shape(self) -> tuple[Size, ...]:
        """The output's sizes."""
        return tuple(map(self.facts.known_size, shape_of(self.out)))

    @property
    def is_float(self) -> bool:
        out = self.out if isinstance(self.out, torch.Tensor) else self.out[0]
        return bool(out.is_floating_point())

    def number(self, argument: Any) -> Term:
        """A size or offset of the program as an index term."""
        value = self[argument] if isinstance(argument, str) else argument
        return integer(value) if isinstance(value, int) else self.facts.scalar(value)

    def write_back(self, base: Value, written: Value) -> Value | None:
        """What `base` is after this call's output, a view of it, was overwritten with `written`."""
        function = WRITES.get(self.name)
        return None if function is None else function(self, base, written)
