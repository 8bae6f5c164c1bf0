"""Put a report's pictures, facts and figures together as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from mokfx.errors import MokError
from mokfx.page.cards import CARDS, DEFAULT, Card
from mokfx.page.picture import Drawing, LayerPicture, Sizes
from mokfx.page.svg import LABELS, svg
from mokfx.page.units import number, of_bytes, of_flops, of_seconds
from mokfx.page.work import Floor, Work, floor_of, work_of
from mokfx.passes.outcome import Match, Miss

if TYPE_CHECKING:
    from mokfx.report import GraphReport, Report

MISSING = 'the report page needs Jinja2, which is not installed: pip install "mokfx[report]"'


@dataclass(frozen=True)
class Layer:
    """What the page shows of one layer."""

    number: int
    match: Match
    picture: LayerPicture | None
    works: tuple[Work, ...]

    @property
    def name(self) -> str:
        return f"layer-{self.number}"

    def floor(self, card: Card) -> Floor | None:
        """Of the forward."""
        return floor_of(self.works[0], card) if self.works else None


@dataclass(frozen=True)
class LeftAlone:
    """What the page shows of one near miss."""

    number: int
    miss: Miss
    around: Drawing | None

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


def _environment() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MokError(MISSING) from error
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
        "number": number,
    }
    environment.globals |= {"floor_of": floor_of, "svg": svg}
    return environment


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(name: str) -> str:
    return (files("mokfx.page") / name).read_text(encoding="utf-8")


def _layers(report: Report) -> Iterator[Layer]:
    number = 0
    for graph in report.graphs:
        for match, picture in zip(graph.matches, _pictures_of(graph), strict=True):
            number += 1
            yield Layer(number, match, picture, _works(picture.sizes if picture is not None else None))


def _pictures_of(graph: GraphReport) -> tuple[LayerPicture | None, ...]:
    """One for each match; a report that was not made by `explain` has none."""
    return graph.pictures.layers or (None,) * len(graph.matches)


def _works(sizes: Sizes | None) -> tuple[Work, ...]:
    return () if sizes is None or sizes.tokens is None else work_of(sizes, sizes.tokens)


def _misses(report: Report) -> Iterator[LeftAlone]:
    drawings = {miss: drawing for graph in report.graphs for miss, drawing in graph.pictures.misses.items()}
    for i, miss in enumerate(report.misses, start=1):
        drawing = drawings.get(miss)
        yield LeftAlone(i, miss, drawing if drawing is not None and drawing.steps else None)
