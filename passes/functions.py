"""User `autograd.Function`s: what their forward does to rows, and whether their backward is its derivative.

Dynamo keeps one as a node with a forward and a backward graph. A function that moves rows (an exchange, a permutation,
a gather) is part of a layer if its backward moves the gradient by the adjoint: the row that was read gets the sum of
the gradients of the rows that read it. Both graphs are run on probes, and the two movements are compared.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from mokfx.passes.abroad import mirrored
from mokfx.passes.facts import shape_of
from mokfx.passes.scatter import scatter
from mokfx.passes.terms import ZERO, Substitution, Term, at, substitute
from mokfx.passes.value import Leaf, Value, axis_of, bind, position

if TYPE_CHECKING:
    from mokfx.passes.interpret import GraphRun


@dataclass
class Function:
    """One call of a user function in a graph."""

    forward: GraphModule
    backward: GraphModule
    arguments: tuple[Any, ...]
    used: frozenset[int]
    """Which results the graph uses: before torch 2.13 a function also returns its intermediate values."""


def function_of(run: GraphRun, node: Node) -> Function | None:
    """The function that a node calls, or None if the node is another higher-order op."""
    if getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    forward, backward, *arguments = run.fetch_args_kwargs_from_env(node)[0]
    if not (isinstance(forward, GraphModule) and isinstance(backward, GraphModule)):
        return None
    used = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
    return Function(forward, backward, tuple(arguments), frozenset(i for i in used if isinstance(i, int)))


def outputs_of(run: GraphRun, function: Function) -> tuple[Any, ...]:
    """The forward's results, with their facts."""
    results, _ = _call_forward(run, function, function.arguments)
    return results


def why_not_mirror(run: GraphRun, function: Function) -> str | None:
    """Why the backward is not the adjoint of the forward, or None if it is."""
    moved = [i for i, a in enumerate(function.arguments) if _is_data(a)]
    if len(moved) != 1:
        return "it takes more than one tensor of data"
    (which,) = moved
    probe = torch.empty_like(function.arguments[which], requires_grad=False)
    source = run.tracker.facts.leaf(probe, run.tracker.node)
    arguments = (*function.arguments[:which], probe, *function.arguments[which + 1 :])
    results, saved = _call_forward(run, function, arguments)
    outputs = [i for i, r in enumerate(results) if _is_data(r) and i in function.used]
    if len(outputs) != 1:
        return "it returns more than one tensor of data"
    (returned_as,) = outputs
    output = results[returned_as]
    forward = run.tracker.value(output)
    read = forward.body
    if read.op != "at" or read.args[0] is not source.body.args[0]:
        return "its forward does more than move rows"
    gradient = torch.empty_like(output, requires_grad=False)
    incoming = run.tracker.facts.leaf(gradient, run.tracker.node)
    gradients = [gradient if i == returned_as else None for i in range(len(results))]
    returned = run.nested(function.backward, (*gradients, *saved))
    returned = returned if isinstance(returned, tuple | list) else (returned,)
    given = [g for g in returned if isinstance(g, torch.Tensor)]
    if len(given) != 1 or given[0].dim() != probe.dim():
        return "its backward returns no gradient of the rows"
    backward = run.tracker.value(given[0])
    expected = _adjoint(run, forward, read, incoming, probe)
    if expected is None or not _equal(expected, backward):
        return "its backward does not move the gradient back the way that its forward moved the rows"
    return None


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _call_forward(
    run: GraphRun, function: Function, arguments: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The forward graph returns its outputs and what it saves for the backward."""
    results, saved = run.nested(function.forward, arguments)
    return tuple(results) if isinstance(results, tuple | list) else (results,), tuple(saved)


def _adjoint(run: GraphRun, forward: Value, read: Term, incoming: Value, probe: torch.Tensor) -> Value | None:
    """The gradient of a read: zeros, plus each row of the incoming gradient where its row was read."""
    leaf = incoming.body.args[0]
    assert isinstance(leaf, Leaf)
    element = at(leaf, mirrored(read.args[1]), *(position(axis) for axis in forward.axes))
    zeros = Value(tuple(axis_of(size) for size in shape_of(probe)), ZERO)
    indices = dict(enumerate(read.args[2:]))
    return scatter(run.tracker.facts, zeros, indices, Value(forward.axes, element), {}, accumulate=True)


def _equal(expected: Value, actual: Value) -> bool:
    mapping: Substitution = {}
    for a, b in zip(expected.axes, actual.axes, strict=True):
        mapping |= bind(a, position(b))
    return substitute(expected.body, mapping) is actual.body
