"""Both layouts of every picture: boxes apart, in their bands, edges from box to box, and downwards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from mokfx import Report
from mokfx.page import graphviz, layered
from mokfx.page.layout import BANDS, Box, Layout, lay_out, size_of
from mokfx.page.picture import Drawing, Step

MODELS = ("deepseek_like", "match_and_misses", "misses_only")
needs_dot = pytest.mark.skipif(graphviz.program() is None, reason="Graphviz's program dot is not installed")
LAYOUTS = [pytest.param(layered.lay_out, id="own"), pytest.param(graphviz.lay_out, id="dot", marks=needs_dot)]
Lay = Callable[[Drawing], Layout | None]


def drawings(report: Report) -> list[Drawing]:
    layers = [picture for graph in report.graphs for picture in graph.pictures.layers]
    misses = [drawing for graph in report.graphs for drawing in graph.pictures.misses.values()]
    return [drawing for layer in layers for drawing in (layer.before, layer.after)] + misses


@pytest.mark.parametrize("lay", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_boxes_bands_and_edges(report_of: Callable[[str], Report], name: str, lay: Lay) -> None:
    made = drawings(report_of(name))
    assert made
    for drawing in made:
        layout = lay(drawing)
        assert layout is not None
        check(drawing, layout)


def check(drawing: Drawing, layout: Layout) -> None:
    sides = [side for box in layout.boxes for side in (box.width, box.height)]
    assert sides == pytest.approx([side for step in drawing.steps for side in size_of(step)])
    for a, b in combinations(layout.boxes, 2):
        assert not overlap(a, b)
    canvas = Box(0, 0, layout.width, layout.height)
    bands = {band.stage: band.box for band in layout.bands}
    for step, box in zip(drawing.steps, layout.boxes, strict=True):
        assert within(box, canvas)
        assert within(box, bands[step.stage])
    order = {stage: i for i, stages in enumerate(BANDS) for stage in stages}
    for upper, lower in combinations(sorted(bands, key=order.__getitem__), 2):
        assert not overlap(bands[upper], bands[lower])
        if order[upper] < order[lower]:
            assert bands[upper].y < bands[lower].y
    wanted = {(source, target) for target, step in enumerate(drawing.steps) for source in step.inputs}
    assert {(edge.source, edge.target) for edge in layout.edges} == wanted
    for edge in layout.edges:
        assert layout.boxes[edge.source].y < layout.boxes[edge.target].y
        assert near(edge.points[0], layout.boxes[edge.source])
        assert near(edge.points[-1], layout.boxes[edge.target])


def overlap(a: Box, b: Box) -> bool:
    return (
        min(a.x + a.width, b.x + b.width) - max(a.x, b.x) > 0.5
        and min(a.y + a.height, b.y + b.height) - max(a.y, b.y) > 0.5
    )


def within(inner: Box, outer: Box, by: float = 1.0) -> bool:
    return (
        outer.x - by <= inner.x
        and outer.y - by <= inner.y
        and inner.x + inner.width <= outer.x + outer.width + by
        and inner.y + inner.height <= outer.y + outer.height + by
    )


def near(point: tuple[float, float], box: Box, by: float = 3.0) -> bool:
    x, y = point
    return box.x - by <= x <= box.x + box.width + by and box.y - by <= y <= box.y + box.height + by


@pytest.mark.parametrize("lay", LAYOUTS)
def test_a_wide_and_a_long_drawing(lay: Lay) -> None:
    fan = tuple(Step(f"n{i}", "relu", "dispatch", inputs=() if i == 0 else (0,)) for i in range(40))
    chain = tuple(Step(f"n{i}", "relu", "combine", inputs=tuple({i - 1, i // 2} - {-1, i})) for i in range(100))
    for steps in (fan, chain):
        drawing = Drawing(steps)
        layout = lay(drawing)
        assert layout is not None
        check(drawing, layout)


def test_own_layout_crosses_no_edges_where_none_need_to() -> None:
    """Four pairs whose ends are listed the other way round."""
    tops = [Step(f"a{i}", "relu", "dispatch") for i in range(4)]
    ends = [Step(f"b{i}", "relu", "dispatch", inputs=(3 - i,)) for i in range(4)]
    layout = layered.lay_out(Drawing((*tops, *ends)))
    across = [[layout.boxes[i].x for i in edge] for edge in [(3 - i, 4 + i) for i in range(4)]]
    for (a, b), (c, d) in combinations(across, 2):
        assert (a < c) == (b < d)


def test_without_dot_the_own_layout_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Drawing((Step("a", "relu", "dispatch"), Step("b", "relu", "combine", inputs=(0,))))
    monkeypatch.setattr(graphviz, "program", lambda: None)
    assert lay_out(drawing) == layered.lay_out(drawing)


def test_a_dot_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Drawing((Step("a", "relu", "dispatch"),))
    monkeypatch.setattr(graphviz, "program", lambda: "false")
    assert graphviz.lay_out(drawing) is None
    assert lay_out(drawing) == layered.lay_out(drawing)


def test_nothing_to_draw() -> None:
    assert lay_out(Drawing()) == Layout(0, 0, (), (), ())
