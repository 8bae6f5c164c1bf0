"""Where each step of a drawing goes: by Graphviz if it is installed, else by our own layered layout."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from mokfx.page.picture import Drawing, Step

WIDTH, QUIET_WIDTH = 250, 170
"""Of a box, in pixels at zoom 1."""
BANDS = (
    ("input",),
    ("router",),
    ("dispatch",),
    ("experts", "shared"),
    ("combine",),
    ("op",),
    ("outside",),
    ("known",),
    ("ended",),
    ("unknown",),
)
"""Stages from top to bottom; those of one entry stand side by side."""
LINE, PADDING = 15, 9
_TEXT = 36
"""Characters of a meaning that fit into a box side by side."""


@dataclass(frozen=True)
class Box:
    """A step's place: its upper left corner, and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Band:
    """The area of one stage."""

    stage: str
    box: Box


@dataclass(frozen=True)
class Edge:
    """The way from one step to another: the points of a smooth curve, or of a chain of cubic Beziers."""

    source: int
    target: int
    points: tuple[tuple[float, float], ...]
    bezier: bool = False


@dataclass(frozen=True)
class Layout:
    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    bands: tuple[Band, ...]


def title(step: Step) -> str:
    """The first line of a box: `order = argsort`, or an input's name."""
    if not step.op:
        return step.name
    own = step.name.removesuffix("_default").rstrip("0123456789_")
    named = own and own.strip("_") not in step.op and step.op.strip("_") not in own and step.stage != "op"
    return f"{step.name} = {step.op}" if named and step.count == 1 else step.op


def lines_of(step: Step) -> list[str]:
    """The meaning as it stands in the box: at most three lines."""
    if step.quiet or not step.meaning:
        return []
    lines = textwrap.wrap(step.meaning, _TEXT, break_long_words=True)
    return lines if len(lines) < 4 else [*lines[:2], lines[2][: _TEXT - 2] + " …"]


def size_of(step: Step) -> tuple[float, float]:
    """Width and height of the box."""
    if step.quiet:
        return QUIET_WIDTH, LINE + PADDING
    return WIDTH, LINE * (2 + len(lines_of(step))) + 2 * PADDING


def lay_out(drawing: Drawing) -> Layout:
    """Lay a drawing out, top to bottom."""
    from mokfx.page import graphviz, layered

    return graphviz.lay_out(drawing) or layered.lay_out(drawing)
