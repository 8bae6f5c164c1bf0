"""A layered layout of our own: rows from inputs to output, a band for each stage, few crossings.

Each step stands below all that it needs, and the stages below each other. An edge over several rows runs through a
point in each row between. Within its row a step moves towards the middle of its neighbours: first in order
(which keeps crossings few), then in place (which keeps edges straight).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from mokfx.page.layout import BANDS, Band, Box, Edge, Layout, size_of
from mokfx.page.picture import Drawing

GAP_X, GAP_Y, MARGIN, LABEL = 22.0, 26.0, 18.0, 24.0
"""Pixels between boxes side by side, between rows, around the drawing, for the name of a band."""


@dataclass(eq=False)
class _Point:
    """A step, or where an edge crosses a row."""

    step: int | None
    row: int
    width: float
    right: bool = False
    """Whether it stands in the right one of two stages side by side."""
    above: list[_Point] = field(default_factory=list)
    below: list[_Point] = field(default_factory=list)
    x: float = 0.0


def lay_out(drawing: Drawing) -> Layout:
    """Lay a drawing out, top to bottom."""
    if not drawing.steps:
        return Layout(0, 0, (), (), ())
    rows_of = _rows(drawing)
    points, chains = _points(drawing, rows_of)
    rows = _ordered(points)
    _place(rows)
    _apart(points)
    return _drawn(drawing, rows, points, chains)


def _rows(drawing: Drawing) -> list[int]:
    """The row of each step: below what it needs and below the stages before its own."""
    level = {stage: i for i, stages in enumerate(BANDS) for stage in stages}
    rows = [0] * len(drawing.steps)
    first = 0
    for band in sorted({level.get(step.stage, 0) for step in drawing.steps}):
        members = [i for i, step in enumerate(drawing.steps) if level.get(step.stage, 0) == band]
        for i in members:
            rows[i] = max([first, *(rows[j] + 1 for j in drawing.steps[i].inputs)])
        _lower(drawing, members, rows)
        first = max(rows[i] for i in members) + 1
    return rows


def _lower(drawing: Drawing, members: list[int], rows: list[int]) -> None:
    """Let a step that needs nothing of its own stage stand right above the first that needs it."""
    inside = set(members)
    for i in reversed(members):
        users = [rows[j] for j in members if i in drawing.steps[j].inputs]
        if users and not inside & set(drawing.steps[i].inputs):
            rows[i] = min(users) - 1


def _points(drawing: Drawing, rows_of: list[int]) -> tuple[list[_Point], dict[tuple[int, int], list[_Point]]]:
    points = [
        _Point(i, row, size_of(step)[0], step.stage == "shared")
        for i, (step, row) in enumerate(zip(drawing.steps, rows_of, strict=True))
    ]
    chains: dict[tuple[int, int], list[_Point]] = {}
    bends: list[_Point] = []
    for target, step in enumerate(drawing.steps):
        for source in step.inputs:
            between = [_Point(None, row, 8.0) for row in range(rows_of[source] + 1, rows_of[target])]
            chain = [points[source], *between, points[target]]
            for upper, lower in pairwise(chain):
                upper.below.append(lower)
                lower.above.append(upper)
            chains[source, target] = chain
            bends += between
    return points + bends, chains


def _ordered(points: list[_Point]) -> list[list[_Point]]:
    """The points row by row, each row ordered so that few edges cross."""
    rows: dict[int, list[_Point]] = defaultdict(list)
    for point in points:
        rows[point.row].append(point)
    ordered = [rows[row] for row in sorted(rows)]
    for sweep in range(8):
        down = sweep % 2 == 0
        for row in ordered if down else reversed(ordered):
            place = {point: i / max(len(other), 1) for other in ordered for i, point in enumerate(other)}

            def middle(point: _Point, place: dict[_Point, float] = place, down: bool = down) -> tuple[bool, float]:
                beside = point.above if down else point.below
                return point.right, sum(map(place.__getitem__, beside)) / len(beside) if beside else place[point]

            row.sort(key=middle)
    return ordered


def _place(rows: list[list[_Point]]) -> None:
    for row in rows:
        left = 0.0
        for point in row:
            point.x = left + point.width / 2
            left += point.width + GAP_X
        for point in row:
            point.x -= left / 2
    for sweep in range(40):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for point in row:
                beside = [*point.above, *point.below]
                wanted.append(sum(other.x for other in beside) / len(beside) if beside else point.x)
            _settle(row, wanted)


def _settle(row: list[_Point], wanted: list[float]) -> None:
    """Move each point as near to its wanted place as the order and the gaps allow (least squares)."""
    shift = [0.0]
    for left, right in pairwise(row):
        shift.append(shift[-1] + (left.width + right.width) / 2 + GAP_X)
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, shift, strict=True):
        blocks.append((want - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:  # they would overlap: they move as one
            (a, n), (b, m) = blocks.pop(-2), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    places = [place for place, number in blocks for _ in range(number)]
    for point, place, offset in zip(row, places, shift, strict=True):
        point.x = place + offset


def _apart(points: list[_Point]) -> None:
    """Two stages side by side do not overlap: the right one moves as a whole."""
    right = [point for point in points if point.right]
    rows = {point.row for point in right}
    left = [point for point in points if point.row in rows and point.step is not None and not point.right]
    if right and left:
        gap = min(p.x - p.width / 2 for p in right) - max(p.x + p.width / 2 for p in left)
        for point in right:
            point.x += max(0.0, 3 * GAP_X - gap)


def _drawn(
    drawing: Drawing,
    rows: list[list[_Point]],
    points: list[_Point],
    chains: dict[tuple[int, int], list[_Point]],
) -> Layout:
    sizes = [size_of(step) for step in drawing.steps]
    left = min(point.x - point.width / 2 for point in points) - 2 * MARGIN
    width = max(point.x + point.width / 2 for point in points) - left + 2 * MARGIN
    tops: list[float] = []
    heights: list[float] = []
    y, stage = MARGIN, ""
    for row in rows:
        steps = [point.step for point in row if point.step is not None]
        named = next((drawing.steps[i].stage for i in steps if drawing.steps[i].stage != "shared"), "shared")
        if named != stage:
            y, stage = y + LABEL, named
        tops.append(y)
        heights.append(max((sizes[i][1] for i in steps), default=0.0))
        y += heights[-1] + GAP_Y
    boxes = []
    for i, (own_width, height) in enumerate(sizes):
        point = points[i]
        top = tops[point.row] + (heights[point.row] - height) / 2
        boxes.append(Box(point.x - own_width / 2 - left, top, own_width, height))
    edges = []
    for (source, target), chain in chains.items():
        middle = [(point.x - left, tops[point.row] + heights[point.row] / 2) for point in chain[1:-1]]
        start = (chain[0].x - left, boxes[source].y + boxes[source].height)
        edges.append(Edge(source, target, (start, *middle, (chain[-1].x - left, boxes[target].y))))
    return Layout(width, y, tuple(boxes), tuple(edges), tuple(_bands(drawing, boxes)))


def _bands(drawing: Drawing, boxes: list[Box]) -> list[Band]:
    found = []
    for stage in dict.fromkeys(step.stage for step in drawing.steps):
        own = [box for box, step in zip(boxes, drawing.steps, strict=True) if step.stage == stage]
        x, y = min(box.x for box in own) - MARGIN, min(box.y for box in own) - LABEL
        right, bottom = max(box.x + box.width for box in own), max(box.y + box.height for box in own)
        found.append(Band(stage, Box(x, y, right - x + MARGIN, bottom - y + 10)))
    return found
