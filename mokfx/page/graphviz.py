"""The layout of Graphviz's `dot`, where the program is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from mokfx.page.layout import BANDS, Band, Box, Edge, Layout, size_of
from mokfx.page.picture import Drawing

LABEL = 24.0
"""Pixels for the name of a band."""
SECONDS = 20.0
"""A drawing that takes `dot` longer is laid out by ourselves."""


@cache
def program() -> str | None:
    """Where `dot` is, if it is installed."""
    return shutil.which("dot")


def lay_out(drawing: Drawing) -> Layout | None:
    """Lay a drawing out, top to bottom; None if there is no `dot`, or it fails."""
    dot = program()
    if dot is None or not drawing.steps:
        return None
    try:
        text = "\n".join(_source(drawing))
        done = subprocess.run([dot, "-Tjson"], input=text, capture_output=True, text=True, timeout=SECONDS, check=True)
        return _read(json.loads(done.stdout), drawing)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def _source(drawing: Drawing) -> Iterator[str]:
    """The drawing in the language of `dot`: only numbers in it, so that there is nothing to quote."""
    yield "digraph {"
    yield 'graph [rankdir=TB, ranksep=0.32, nodesep=0.28, splines=spline, margin=0, pad=0, dpi=72, newrank=false];'
    yield 'node [shape=box, fixedsize=true, label=""]; edge [arrowhead=none];'
    for stage in dict.fromkeys(step.stage for step in drawing.steps):
        members = [i for i, step in enumerate(drawing.steps) if step.stage == stage]
        yield f"subgraph cluster_{stage} {{ margin=14; label=\" \"; labeljust=l; fontsize={LABEL * 0.6};"
        for i in members:
            width, height = size_of(drawing.steps[i])
            yield f"n{i} [width={width / 72:.4f}, height={height / 72:.4f}];"
        yield "}"
    present = {step.stage for step in drawing.steps}
    bands = [band for band in BANDS if not present.isdisjoint(band)]
    level = {stage: i for i, band in enumerate(bands) for stage in band}
    for target, step in enumerate(drawing.steps):
        for source in step.inputs:
            # An edge that passes whole stages rather goes where there is room than pull at the others.
            weight = 4 if level[step.stage] - level[drawing.steps[source].stage] < 2 else 1
            yield f"n{source} -> n{target} [weight={weight}];"
    yield from _stacked(drawing)
    yield "}"


def _stacked(drawing: Drawing) -> Iterator[str]:
    """Invisible edges through a point between two bands: each band then lies below the one before."""
    present = {step.stage for step in drawing.steps}
    bands = [here for band in BANDS if (here := present & set(band))]
    for number, (upper, lower) in enumerate(pairwise(bands)):
        ends = [i for i, step in enumerate(drawing.steps) if step.stage in upper]
        starts = [i for i, step in enumerate(drawing.steps) if step.stage in lower]
        needed = {j for i in ends for j in drawing.steps[i].inputs}
        yield f"between{number} [style=invis, shape=point, width=0.01, height=0.01];"
        for i in sorted(set(ends) - needed):
            yield f"n{i} -> between{number} [style=invis, weight=0];"
        for i in starts:
            if not set(drawing.steps[i].inputs) & set(starts):
                yield f"between{number} -> n{i} [style=invis, weight=0];"


def _read(made: dict[str, Any], drawing: Drawing) -> Layout:
    """The JSON of `dot`, whose y points up and whose unit is the point."""
    _, _, width, height = map(float, made["bb"].split(","))
    objects = made["objects"]
    boxes: dict[int, Box] = {}
    bands = []
    for item in objects:
        name = item["name"]
        if name.startswith("cluster_"):
            left, bottom, right, top = map(float, item["bb"].split(","))
            bands.append(Band(name.removeprefix("cluster_"), Box(left, height - top, right - left, top - bottom)))
        elif name.startswith("n"):
            i = int(name[1:])
            x, y = map(float, item["pos"].split(","))
            w, h = size_of(drawing.steps[i])
            boxes[i] = Box(x - w / 2, height - y - h / 2, w, h)
    edges = []
    for item in made.get("edges", ()):
        ends = [objects[item[end]]["name"] for end in ("tail", "head")]
        if any(name.startswith("between") for name in ends):
            continue
        source, target = (int(name[1:]) for name in ends)
        points = [tuple(map(float, point.split(","))) for point in item["pos"].removeprefix("e,").split(" ")]
        edges.append(Edge(source, target, tuple((x, height - y) for x, y in points), bezier=True))
    ordered = tuple(boxes[i] for i in range(len(drawing.steps)))
    return Layout(width, height, ordered, tuple(edges), tuple(bands))
