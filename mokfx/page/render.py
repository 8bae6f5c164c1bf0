"""Put a report's pictures, facts and figures together as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from mokfx.errors import MokError
from mokfx.page.cards import CARDS, DEFAULT, Card
from mokfx.page.layout import Layout, lay_out
from mokfx.page.picture import Drawing, LayerPicture, Sizes
from mokfx.page.svg import LABELS, svg
from mokfx.page.units import of_bytes, of_flops, of_seconds
from mokfx.page.work import Floor, Work, floor_of, work_of
from mokfx.passes.outcome import Match, Miss

if TYPE_CHECKING:
    from mokfx.report import Report

MISSING = 'the report page needs Jinja2, which is not installed: pip install "mokfx[report]"'


WIDE = 980
"""Pixels; a wider drawing gets the whole width of the page."""


@dataclass(frozen=True)
class Figure:
    """A drawing and where its steps go."""

    drawing: Drawing
    layout: Layout

    @property
    def wide(self) -> bool:
        return self.layout.width > WIDE

    def svg(self, prefix: str, label: str) -> str:
        return svg(self.drawing, self.layout, prefix, label)


@dataclass(frozen=True)
class Layer:
    """What the page shows of one layer."""

    number: int
    match: Match
    before: Figure | None
    """None in a report that was made without pictures."""
    after: Figure | None
    sizes: Sizes | None
    works: tuple[Work, ...]

    @property
    def name(self) -> str:
        return f"layer-{self.number}"

    @property
    def owner(self) -> str:
        """What the names of the layer's weights begin with: it tells layers apart that one line computes."""
        steps = () if self.after is None else self.after.drawing.steps
        names = [weight.split(" ")[0].split("_") for step in steps if step.stage == "op" for weight in step.weights]
        shared = takewhile(lambda words: len(set(words)) == 1 and words[0] != "*", zip(*names, strict=False))
        return "_".join(words[0] for words in shared)

    def floor(self, card: Card) -> Floor | None:
        """Of the forward."""
        return floor_of(self.works[0], card) if self.works else None


@dataclass(frozen=True)
class LeftAlone:
    """What the page shows of one near miss."""

    number: int
    miss: Miss
    around: Figure | None

    @property
    def name(self) -> str:
        return f"miss-{self.number}"


def page(report: Report, card: str = DEFAULT, title: str = "") -> str:
    """The page's HTML.

    Args:
        card: a name of CARDS, whose floors are shown first.
        title: what was explained, for the heading.

    Raises:
        MokError: Jinja2 is not installed, or the card is unknown.
    """
    if card not in CARDS:
        raise MokError(f"no figures are known of the card {card!r}: choose one of {', '.join(CARDS)}")
    template = _environment().get_template("page.html")
    layers = list(_layers(report))
    text: str = template.render(
        title=title,
        report=report,
        layers=layers,
        misses=list(_misses(report)),
        nodes_before=sum(graph.nodes_before for graph in report.graphs),
        nodes_after=sum(graph.nodes_after for graph in report.graphs),
        seconds=sum(graph.seconds for graph in report.graphs),
        cards=list(CARDS.values()),
        chosen=card,
        style=_text("page.css"),
        script=_text("page.js"),
        versions=f"mokfx {version('mokfx')}, torch {torch.__version__}",
        labels=LABELS,
    )
    return text


def require_jinja() -> Any:
    """The module `jinja2`.

    Raises:
        MokError: it is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MokError(MISSING) from error
    return jinja2


def _environment() -> Any:
    jinja2 = require_jinja()
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "bytes": of_bytes,
        "sentence": _sentence,
        "flops": of_flops,
        "seconds": of_seconds,
    }
    environment.globals["floor_of"] = floor_of
    return environment


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(name: str) -> str:
    return (files("mokfx.page") / name).read_text(encoding="utf-8")


def _layers(report: Report) -> Iterator[Layer]:
    number = 0
    for graph in report.graphs:
        pictures = graph.pictures.layers or (LayerPicture(),) * len(graph.matches)
        for match, picture in zip(graph.matches, pictures, strict=True):
            number += 1
            sizes = picture.sizes
            works = () if sizes is None or sizes.tokens is None else work_of(sizes, sizes.tokens)
            yield Layer(number, match, _figure(picture.before), _figure(picture.after), sizes, works)


def _misses(report: Report) -> Iterator[LeftAlone]:
    drawings = {miss: drawing for graph in report.graphs for miss, drawing in graph.pictures.misses.items()}
    for i, miss in enumerate(report.misses, start=1):
        yield LeftAlone(i, miss, _figure(drawings.get(miss)))


def _figure(drawing: Drawing | None) -> Figure | None:
    return Figure(drawing, lay_out(drawing)) if drawing is not None and drawing.steps else None
