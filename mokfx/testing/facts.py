"""What the pass knows of each value of a model's graphs: for those who write rules, and for the documentation."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._dynamo
from torch.fx import GraphModule

from mokfx.compile import capture_sizes
from mokfx.page.meaning import Words
from mokfx.passes.reading import Reading
from mokfx.passes.rewrite import rewrite
from mokfx.passes.source import source_of
from mokfx.passes.value import Value
from mokfx.readable import short_name
from mokfx.undisturbed import undisturbed_dynamo, undisturbed_state

LETTERS = "ijklmnopqrstuvw"
_VARIABLE = re.compile(r"\bv\d+\b")
_INPUT = re.compile(r"\bL_\w+", re.I)
_ORDER = re.compile(r"the order `(\w+)`")
_ALL = re.compile(r"\[k\d+(?:, k\d+)*\]")


@dataclass(frozen=True)
class Fact:
    """What the pass knows of one value of a graph."""

    name: str
    """The value's name in the graph."""
    equation: str
    """`rows[i, j] = x[div(order[i], 2), j]`; a dimension that has several variables has them in parentheses."""
    meaning: str
    """The same in words, "" where it has nothing to do with routing."""
    where: str
    """`file.py:line`."""

    def __str__(self) -> str:
        return self.equation


def facts_of(model: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Fact, ...]:
    """Trace `model(*args, **kwargs)` once, and return what the pass knows of each value, in the order of the graph.

    Sizes that depend on data are captured. The model and Dynamo are left as they were.

    Args:
        model: a module or a function that is not compiled.
        args, kwargs: its inputs.

    Raises:
        Whatever the model raises.
    """
    found: list[Fact] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = copy.deepcopy(gm)
        rewrite(gm, watch=lambda reading: found.extend(_facts(reading)))
        return captured.forward

    with undisturbed_state(model), undisturbed_dynamo(backend), capture_sizes():
        torch._dynamo.optimize(backend=cast(Any, backend))(model)(*args, **kwargs)
    return tuple(found)


def _facts(reading: Reading) -> Iterator[Fact]:
    words = Words([region.found.layer for region, _ in reading.layers], reading.tracker.facts)
    for node, value in reading.tracker.said.items():
        tensor = reading.values.get(node)
        if isinstance(tensor, torch.Tensor):
            meaning = words.of(value, tensor.is_floating_point())
            yield Fact(short_name(node.name), _equation(node.name, value), meaning, source_of(node).where)


def _equation(name: str, value: Value) -> str:
    axes = ", ".join(str(axis[0]) if len(axis) == 1 else f"({', '.join(map(str, axis))})" for axis in value.axes)
    text = f"{name}[{axes}] = {value.body}"
    letters = dict(zip(dict.fromkeys(_VARIABLE.findall(text)), LETTERS, strict=False))
    text = _VARIABLE.sub(lambda variable: letters.get(variable[0], variable[0]), text)
    text = _ORDER.sub(r"\1", _INPUT.sub(lambda name: short_name(name[0]), text))
    return _ALL.sub("", text)
