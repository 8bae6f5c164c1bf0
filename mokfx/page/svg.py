"""A laid-out drawing as SVG: bands, edges, and a box for each step that links to its row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from mokfx.page.layout import BANDS, LINE, PADDING, Band, Box, Edge, Layout, lines_of, title
from mokfx.page.picture import Drawing, Step

LABELS = {
    "input": "inputs",
    "router": "router",
    "dispatch": "dispatch",
    "experts": "experts",
    "shared": "shared expert",
    "combine": "combine",
    "op": "one call",
    "outside": "what follows",
    "known": "understood",
    "ended": "understanding ended here",
    "unknown": "what follows",
}
"""Stage -> what its band is called."""
SIDE = 6.0
"""Pixels between a band and the edge of the drawing."""
_CHARS = 32
"""Characters of monospaced text that fit into a box."""
_QUIET_CHARS = 23


def svg(drawing: Drawing, layout: Layout, prefix: str, label: str) -> str:
    """The drawing as an `svg` element; every text in it is escaped.

    Args:
        layout: where its steps go.
        prefix: of the ids in it. The box of step i is `prefix-i` and links to `#prefix-row-i`.
        label: what a screen reader calls it.
    """
    return "\n".join(_lines(drawing, layout, prefix, label))


def _lines(drawing: Drawing, layout: Layout, prefix: str, label: str) -> Iterator[str]:
    width, height = round(layout.width), round(layout.height)
    yield (
        f'<svg class="graph" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="group" aria-label="{escape(label)}">'
    )
    yield (
        f'<defs><marker id="{prefix}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    for band in layout.bands:
        box = _aligned(band, layout)
        yield f'<g class="band {band.stage}">{_rect(box, 10)}'
        yield f'<text x="{box.x + 12:.0f}" y="{box.y + 16:.0f}">{LABELS[band.stage]}</text></g>'
    for edge in layout.edges:
        yield (
            f'<path class="edge" data-from="{edge.source}" data-to="{edge.target}" d="{_path(edge)}" '
            f'marker-end="url(#{prefix}-tip)"/>'
        )
    for i, (step, box) in enumerate(zip(drawing.steps, layout.boxes, strict=True)):
        yield from _box(step, box, f"{prefix}-{i}", f"{prefix}-row-{i}", i)
    yield "</svg>"


def _aligned(band: Band, layout: Layout) -> Box:
    """A band's area, from edge to edge unless another stage stands beside it."""
    row = next(stages for stages in BANDS if band.stage in stages)
    beside = [other for other in layout.bands if other.stage in row and other is not band]
    left, right = SIDE, layout.width - SIDE
    if any(other.box.x > band.box.x for other in beside):
        right = band.box.x + band.box.width
    if any(other.box.x < band.box.x for other in beside):
        left = band.box.x
    return Box(left, band.box.y, right - left, band.box.height)


def _box(step: Step, box: Box, own: str, row: str, number: int) -> Iterator[str]:
    classes = " ".join(filter(None, ["node", step.stage, "kept" if step.kept else "", "quiet" if step.quiet else ""]))
    spoken = ", ".join(filter(None, [title(step), _times(step), LABELS[step.stage], step.meaning, step.where]))
    yield f'<a class="{classes}" id="{own}" href="#{row}" data-step="{number}" aria-label="{escape(spoken)}">'
    yield f"<title>{escape(spoken)}</title>"
    if step.count > 1:  # a second sheet behind the first
        yield _rect(Box(box.x + 4, box.y + 4, box.width, box.height), 6, "behind")
    yield _rect(box, 6)
    x, y = box.x + 10, box.y + PADDING + 10
    if step.quiet:
        text = title(step) + (f" {_times(step)}" if step.count > 1 else "")
        yield _text(x, box.y + box.height / 2 + 4, _cut(text, _QUIET_CHARS), "name")
    else:
        yield _text(x, y, _cut(title(step), _CHARS - (5 if step.count > 1 else 0)), "name")
        if step.count > 1:
            yield _text(box.x + box.width - 10, y, _times(step), "times")
        for i, line in enumerate(lines_of(step)):
            yield _text(x, y + LINE * (i + 1), line, "says")
        yield _text(x, box.y + box.height - PADDING, _cut(step.where, _CHARS), "where")
    yield "</a>"


def _times(step: Step) -> str:
    return f"x{step.count}" if step.count > 1 else ""


def _rect(box: Box, radius: int, name: str = "") -> str:
    attribute = f' class="{name}"' if name else ""
    return (
        f'<rect{attribute} x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{radius}"/>'
    )


def _text(x: float, y: float, text: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]} …"


def _path(edge: Edge) -> str:
    points = [(round(x, 1), round(y, 1)) for x, y in edge.points]
    start = f"M{points[0][0]} {points[0][1]}"
    if edge.bezier:
        return start + "C" + " ".join(f"{x} {y}" for x, y in points[1:])
    slopes = [0.0] * len(points)  # an edge leaves and arrives straight down
    for i in range(1, len(points) - 1):
        (x0, y0), (x1, y1) = points[i - 1], points[i + 1]
        slopes[i] = (x1 - x0) / max(y1 - y0, 1.0)
    parts = []
    for ((x0, y0), a), ((x1, y1), b) in pairwise(zip(points, slopes, strict=True)):
        third = (y1 - y0) / 3
        parts.append(f"C{x0 + a * third:.1f} {y0 + third:.1f} {x1 - b * third:.1f} {y1 - third:.1f} {x1} {y1}")
    return start + "".join(parts)
