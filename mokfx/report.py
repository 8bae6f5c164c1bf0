"""What happened to the graphs of a model, as values and as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from mokfx.errors import MokError, describe_miss
from mokfx.page.picture import Pictures
from mokfx.passes.outcome import Match, Miss

WIDTH = 96
_LABEL = 10
"""Columns of the label of a row ("dispatch  ")."""


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ended one graph and began another."""

    reason: str
    """The first line of Dynamo's explanation."""
    where: str
    """`file.py:line`, or "" where Dynamo does not know it."""
    code: str = ""


@dataclass(frozen=True)
class GraphReport:
    """What the pass did with one graph."""

    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]
    before: str
    """Readable code of the captured graph; "" if nobody asked for it. See `readable`."""
    after: str
    """The same, after the pass."""
    nodes_before: int
    nodes_after: int
    seconds: float
    """Wall time of the pass."""
    ended_by: GraphBreak | None = None
    """The graph break after which this graph ends, if one does."""
    pictures: Pictures = field(default_factory=Pictures, repr=False, compare=False)
    """What `Report.html` draws of the graph; empty if nobody asked for it."""

    def __str__(self) -> str:
        return str(Report((self,)))


@dataclass(frozen=True)
class Report:
    """What the pass did with every graph of a model, in the order in which they ran. `print` it."""

    graphs: tuple[GraphReport, ...]
    more_breaks: tuple[GraphBreak, ...] = ()
    """Breaks that came before any graph had an operation."""

    @property
    def matches(self) -> tuple[Match, ...]:
        """Each MoE layer that became one call of `mok.moe`."""
        return tuple(match for graph in self.graphs for match in graph.matches)

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Each thing that looks like an MoE layer and was left alone; the same one is told once."""
        return tuple(dict.fromkeys(miss for graph in self.graphs for miss in graph.misses))

    @property
    def graph_breaks(self) -> tuple[GraphBreak, ...]:
        """Where Dynamo could not go on within one graph; each place once."""
        ends = (graph.ended_by for graph in self.graphs)
        placed = (graph_break for graph_break in ends if graph_break is not None)
        return tuple(dict.fromkeys((*self.more_breaks, *placed)))

    @property
    def graph_before(self) -> str:
        """Code of the captured graphs."""
        return _joined([graph.before for graph in self.graphs])

    @property
    def graph_after(self) -> str:
        """Code of the graphs that are compiled instead."""
        return _joined([graph.after for graph in self.graphs])

    def html(self, path: str | PathLike[str], *, card: str = "H200", title: str = "") -> None:
        """Write the report as one HTML page, with pictures of the graphs; it needs no network.

        Args:
            path: the file to write; one that is there is overwritten.
            card: the GPU whose floors are shown first: A100, H100, H200 or B200.
            title: what was explained, for the heading.

        Raises:
            MokError: Jinja2 is not installed, the card is unknown, or the file cannot be written.
        """
        from mokfx.page.render import page  # needs the extra mokfx[report]

        text = page(self, card, title)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise MokError(f"the report cannot be written to {str(path)!r}: {error.strerror}") from error

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self._summary()
        for match in self.matches:
            yield ""
            yield from _match_lines(match)
        if self.misses:
            yield from ("", "left alone:")
            for miss in self.misses:
                yield from _wrapped(describe_miss(miss), first="  ", rest="      ")
        if self.graph_breaks:
            yield from ("", "graph breaks:")
            for graph_break in self.graph_breaks:
                place = graph_break.where or "(place unknown)"
                code = f" `{graph_break.code}`" if graph_break.code else ""
                yield from _wrapped(f"{place}{code}: {graph_break.reason}", first="  ", rest="      ")

    def _summary(self) -> str:
        matched, missed, graphs = len(self.matches), len(self.misses), len(self.graphs)
        found = f"{_count(matched, 'MoE layer')} became mok.moe" if matched else "no MoE layer was rewritten"
        left = f", {missed} left alone" if missed else ""
        breaks = f", {_count(len(self.graph_breaks), 'graph break')}" if self.graph_breaks else ""
        before = sum(graph.nodes_before for graph in self.graphs)
        after = sum(graph.nodes_after for graph in self.graphs)
        size = f"{before} nodes, now {after}" if matched else _count(before, "node")
        return f"mokfx: {found}{left} ({_count(graphs, 'graph')}{breaks}; {size})"


def _match_lines(match: Match) -> Iterator[str]:
    code = f"  `{match.code}`" if match.code else ""
    yield textwrap.shorten(f"{match.where}{code}", WIDTH, placeholder=" ...") if code else match.where
    where = f"{match.ranks} ranks of group {match.group!r}" if match.group else "one rank"
    rows = {
        "router": match.router,
        "dispatch": match.dispatch,
        "experts": match.experts,
        "combine": match.combine,
        "shared": match.shared,
        "capacity": match.capacity,
        "ranks": where,
        "sizes": f"tokens {match.tokens}, hidden {match.hidden}, intermediate {match.intermediate}, "
        f"experts {match.num_experts}, top-k {match.top_k}",
        "kept": ", ".join(match.kept),
        "replaced": f"{_count(match.erased, 'node')} by `{match.node}`",
    }
    for label, text in rows.items():
        if text:
            yield from _wrapped(text, first=f"  {label:<{_LABEL}}", rest=" " * (_LABEL + 2))


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _joined(codes: list[str]) -> str:
    if len(codes) == 1:
        return codes[0]
    return "\n\n".join(f"# graph {i + 1} of {len(codes)}\n{code}" for i, code in enumerate(codes))
