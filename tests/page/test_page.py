"""The page as text: everything of the report is on it, escaped, and nothing comes from elsewhere."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import mokfx
from mokfx import Report
from mokfx.errors import MokError
from mokfx.page.picture import Drawing, LayerPicture, Pictures, Step
from mokfx.page.render import page
from mokfx.passes.outcome import Match, Miss
from mokfx.report import GraphBreak, GraphReport

from . import models

EVERY = ("deepseek_like", "match_and_misses", "two_layers", "misses_only", "dense")


class Read(HTMLParser):
    """Tags, ids, links and text of a page; complains about tags that do not close."""

    VOID = frozenset(("meta", "link", "br"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if (name := known.get("id")) is not None:
            self.ids.append(name)
        if tag == "a":
            self.links.append(known["href"] or "")
        self.sources += [known[key] or "" for key in ("src", "srcset", "xlink:href") if key in known]
        if tag == "link":
            self.sources.append(known["href"] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "path")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", EVERY)
def test_the_page_is_sound_and_whole(report_of: Callable[[str], Report], name: str) -> None:
    report = report_of(name)
    text = page(report, title=name)
    read = Read(text)
    assert len(set(read.ids)) == len(read.ids)
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert read.sources == ["data:,"]  # no icon is asked for
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    said = " ".join(" ".join(read.text).split())
    for match in report.matches:
        for fact in (match.where, match.router, match.experts, match.combine, match.code):
            assert " ".join(fact.split()) in said
    for miss in report.misses:
        assert miss.reason[1:] in said
        assert miss.where in said
    assert ("No MoE layer here" in said) == (name == "dense")


def hostile(text: str) -> Report:
    """A report that says `text` wherever a program's own words go."""
    match = Match(
        where=text,
        code=text,
        node=text,
        group=text,
        ranks=2,
        tokens=text,
        hidden=text,
        intermediate=text,
        num_experts=text,
        top_k=text,
        router=text,
        dispatch=text,
        experts=text,
        combine=text,
        shared=text,
        capacity=text,
        kept=(text,),
        erased=3,
    )
    steps = (
        Step(text, text, "input", text, text, text, text, (), (text,)),
        Step(text, text, "op", text, text, text, text, (0,), (text,), count=3),
    )
    miss = Miss(text, text, text, text)
    pictures = Pictures((LayerPicture(Drawing(steps), Drawing(steps)),), {miss: Drawing(steps)})
    graph_break = GraphBreak(text, text, text)
    return Report((GraphReport((match,), (miss,), text, text, 9, 5, 0.1, graph_break, pictures),))


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "{{ 7 * 7 }} {% raw %}", "a < b & c"]
)
def test_what_a_program_says_is_text(text: str) -> None:
    read = Read(page(hostile(text), title=text))
    assert read.open == []
    assert read.sources == ["data:,"]
    assert page(hostile(text), title=text).count("<script") == 1
    assert text in "".join(read.text)


def test_long_names_and_sizes_that_are_no_numbers() -> None:
    text = page(hostile("layers_0_" * 60))
    assert "The sizes of this layer depend on data" in text
    assert Read(text).ids


def test_a_report_that_was_not_drawn_has_its_words(report_of: Callable[[str], Report]) -> None:
    """As the backend makes it, for the log."""
    report = report_of("match_and_misses")
    bare = Report(tuple(replace(graph, pictures=Pictures(), before="", after="") for graph in report.graphs))
    text = page(bare)
    assert "<svg" not in text
    assert report.matches[0].router.split(" ")[0] in text


def test_every_card_has_its_floor(report_of: Callable[[str], Report]) -> None:
    text = page(report_of("deepseek_like"), "B200")
    assert "<option selected>B200</option>" in text
    for name, floor in (("H200", "15.8"), ("B200", "6.85")):
        shown = re.search(rf'<div class="card" data-card="{name}"(.*?)</table>', text, re.S)
        assert shown is not None
        assert f"<strong>{floor} \u00b5s</strong>" in shown[1]
        assert (" hidden" in shown[1].partition(">")[0]) == (name != "B200")


def test_html_writes_the_page(report_of: Callable[[str], Report], tmp_path: Path) -> None:
    report = report_of("misses_only")
    report.html(tmp_path / "page.html", card="H100", title="mine")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(report, "H100", "mine")


def test_mistakes(report_of: Callable[[str], Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of("dense")
    with pytest.raises(MokError, match=r"no figures are known of the card 'TPU': choose one of A100, H100"):
        report.html(tmp_path / "page.html", card="TPU")
    with pytest.raises(MokError, match=r"cannot be written to .*: No such file or directory"):
        report.html(tmp_path / "nowhere" / "page.html")

    ordinary = builtins.__import__

    def without_jinja(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'")
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_jinja)
    with pytest.raises(MokError, match=r'needs Jinja2, which is not installed: pip install "mokfx\[report\]"$'):
        mokfx.Report(()).html(tmp_path / "page.html")


def test_layers_of_one_line_are_told_apart_by_their_weights(report_of: Callable[[str], Report]) -> None:
    text = page(report_of("two_layers"))
    assert re.findall(r'<span class="owner">(\w+)</span>', text) == ["layers_0_experts", "layers_1_experts"]
    assert "(any number; 24 in this call)" in text


def test_a_graph_that_cannot_be_drawn_is_reported_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(reading: object) -> Pictures:
        raise ValueError("no words for it")

    monkeypatch.setattr("mokfx.observe.pictures_of", fails)
    model, args = models.Loop(16, 24, 4, 2), (torch.randn(8, 16),)
    report = mokfx.explain(mokfx.compile(model), *args)
    assert "could not draw a graph" in caplog.text
    assert report.matches[0].router in page(report).replace("&gt;", ">")
