"""A fact about a tensor: axes over variables, and the term that is its element there.

`Value.axes[d]` lists the variables of dimension d, major to minor (none for a dimension of size 1). Reshaping,
permuting and broadcasting move variables between axes; the term does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Node

from mokfx.passes.terms import (
    Size,
    Substitution,
    Term,
    at,
    make,
    product,
    quotient,
    radix,
    substitute,
    unflatten,
    var,
)

Axis = tuple[Term, ...]


@dataclass(eq=False)
class Leaf:
    """A tensor that the graph computes and that the terms take as given."""

    tensor: torch.Tensor
    node: Node
    """The graph node during which it was computed."""
    version: int = 0
    """How often its storage had been changed in place by then."""
    bound: Size | None = None
    """For expert ids: how many experts they choose from, if the graph shows it."""
    distinct: bool = False
    """Whether the entries of a row differ from each other, as top-k's do."""
    made_by: str = ""
    """The ATen op that computed it."""
    inputs: tuple[Any, ...] = ()
    """The facts (or constants) that the op was given."""
    definition: Value | None = None
    """Its element in terms of other leaves, where a rule knows it."""
    layer: Any = None
    """The MoE layer whose output this is."""
    dropped: ClassVar[bool] = False
    """Whether it holds expert ids of which some are -1, and the graph shows which."""

    def __str__(self) -> str:
        return self.node.name


@dataclass(eq=False)
class Stack:
    """Equally shaped leaves, one for each expert, read as one tensor with a leading expert dimension."""

    leaves: tuple[Leaf, ...]
    bound: None = field(default=None, init=False)
    dropped: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"[{self.leaves[0]}, ...]"


@dataclass(frozen=True)
class Value:
    axes: tuple[Axis, ...]
    body: Term

    def with_body(self, body: Term) -> Value:
        return Value(self.axes, body)

    def position(self, dim: int) -> Term:
        """The position along `dim`, in its variables."""
        return position(self.axes[dim])

    def bind(self, dim: int, where: Term) -> Substitution:
        """The substitution that reads dimension `dim` at position `where`."""
        return bind(self.axes[dim], where)

    def __str__(self) -> str:
        return f"{['*'.join(map(str, axis)) or '1' for axis in self.axes]} -> {self.body}"


def sizes(axis: Sequence[Term]) -> list[Size]:
    return [variable.args[1] for variable in axis]


def position(axis: Axis) -> Term:
    return radix(axis, sizes(axis))


def bind(axis: Axis, where: Term) -> Substitution:
    if not axis:
        return {}
    return dict(zip(axis, unflatten(where, sizes(axis)), strict=True))


def axis_of(size: Size) -> Axis:
    """A fresh axis of one variable."""
    variable = var(size)
    return (variable,) if variable.op == "var" else ()


def leaf_value(leaf: Leaf | Stack, shape: Sequence[Size]) -> Value:
    axes = tuple(axis_of(size) for size in shape)
    return Value(axes, at(leaf, (), *(position(axis) for axis in axes)))


def fresh(value: Value) -> Value:
    """The same fact over new variables."""
    renamed = {v: make("var", var(v.args[1]).args[0], v.args[1]) for axis in value.axes for v in axis}
    return Value(tuple(tuple(renamed[v] for v in axis) for axis in value.axes), substitute(value.body, renamed))


def resized(value: Value, shape: Sequence[Size]) -> Value:
    """The same fact where the sizes have other names."""
    axes: list[Axis] = []
    mapping: Substitution = {}
    for axis, size in zip(value.axes, shape, strict=True):
        if len(axis) == 1 and axis[0].args[1] != size:
            axes.append(axis_of(size))
            mapping[axis[0]] = position(axes[-1])
        else:
            axes.append(axis)
    return Value(tuple(axes), substitute(value.body, mapping))


def reshape(value: Value, shape: Sequence[Size]) -> Value | None:
    """The same elements in row-major order under another shape, or None if the sizes do not tell how they line up."""
    variables = [v for axis in value.axes for v in axis]
    todo = list(shape)
    tail: list[Axis] = []
    while todo and variables and (todo[-1] == 1 or todo[-1] == variables[-1].args[1]):
        if len(todo) == 1 and len(variables) > 1:
            break
        tail.insert(0, () if todo[-1] == 1 else (variables.pop(),))
        todo.pop()
    head: list[Axis] = []
    while todo and variables and len(todo) > 1 and (todo[0] == 1 or todo[0] == variables[0].args[1]):
        if todo[0] != 1 and len(variables) == 1 and any(size != 1 for size in todo[1:]):
            break  # this variable is divided among the dimensions that are left
        head.append(() if todo[0] == 1 else (variables.pop(0),))
        todo.pop(0)
    middle = _regroup(variables, todo)
    if middle is None:
        return None
    axes, mapping = middle
    return Value((*head, *axes, *tail), substitute(value.body, mapping))


def _regroup(variables: list[Term], shape: list[Size]) -> tuple[list[Axis], Substitution] | None:
    if all(size == 1 for size in shape):
        return ([() for _ in shape], {}) if not variables else None
    if sum(size != 1 for size in shape) == 1 and variables:
        (whole,) = (size for size in shape if size != 1)
        named: Substitution = {}
        if len(variables) == 1 and variables[0].args[1] != whole and not isinstance(variables[0].args[1], int):
            # A count of rows, which the program says is this size.
            named = {variables[0]: var(whole)}
        whole_axis = tuple(named.get(v, v) for v in variables)
        return [whole_axis if size != 1 else () for size in shape], named
    if len(variables) == 1:
        # The total may be known only at run time (a count of rows); the program says how it divides.
        divided = [axis_of(size) for size in shape]
        parts = [position(axis) for axis in divided]
        return divided, {variables[0]: radix(parts, shape)}
    axes: list[Axis] = []
    mapping: Substitution = {}
    queue = list(variables)
    for size in shape:
        digits: list[Term] = []
        need: Size = size
        while need != 1:
            if not queue:
                return None
            variable = queue.pop(0)
            have: Size = variable.args[1]
            rest = quotient(need, have)
            if rest is not None:
                digits.append(variable)
                need = rest
                continue
            rest = quotient(have, need)
            if rest is None:
                return None
            high, low = var(need), var(rest)
            mapping[variable] = radix([high, low], [need, rest])
            digits.append(high)
            queue.insert(0, low)
            need = 1
        axes.append(tuple(digits))
    return (axes, mapping) if not queue else None


def permute(value: Value, order: Sequence[int]) -> Value:
    return Value(tuple(value.axes[d] for d in order), value.body)


def align(values: Sequence[Value]) -> tuple[tuple[Axis, ...], list[Term]]:
    """Broadcast facts against each other: the common axes, and each fact's element there."""
    if all(value.axes == values[0].axes for value in values):
        return values[0].axes, [value.body for value in values]
    values = [values[0], *(fresh(value) for value in values[1:])]
    rank = max(len(value.axes) for value in values)
    axes: list[Axis] = []
    mappings: list[Substitution] = [{} for _ in values]
    for dim in range(-rank, 0):
        present = [value.axes[dim] if len(value.axes) >= -dim else () for value in values]
        common = max(present, key=len)
        axes.append(common)
        for mapping, axis in zip(mappings, present, strict=True):
            if axis != common:
                mapping.update(bind(axis, position(common)))
    return tuple(axes), [substitute(v.body, m) for v, m in zip(values, mappings, strict=True)]


def size_of(axis: Axis) -> Size:
    return product(sizes(axis))
