"""Texts of reports and graphs without what changes from day to day: line numbers, counters in names, group names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch.fx import GraphModule

from mokfx.readable import readable
from mokfx.report import GraphReport, Report

_LINE = re.compile(r"(?<=\.py):\d+")
_NODES = re.compile(r"; \d+ nodes?(, now \d+)?\)")
_REPLACED = re.compile(r"\n  replaced [^\n]*")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_DEFINED = re.compile(r"^\s*(\w+)(?=: \"[^\"]*\" = | = )", re.M)
_WORD = re.compile(r"(?<![.\w])\w+")
_COUNTER = re.compile(r"_?\d+$")
_GROUP = re.compile(r"(?<=ranks of group ')[^']*(?=')|(?<=group_name = ')[^']*(?=')")


def normalised(what: Report | GraphReport | GraphModule | str) -> str:
    """A text to pin in a test, that stays the same while the meaning does.

    Args:
        what: a report or a graph, or the text of one (`report.graph_after`).

    Returns:
        The text of the report, or the graph's code. Places are files without lines; symbolic sizes are s0, s1, ... and
        u0, u1, ..., the values of a graph linear, linear_1, ... and groups group0, group1, ..., in order of appearance;
        a report does not count the graph's nodes.
    """
    text = readable(what) if isinstance(what, GraphModule) else str(what)
    text = _REPLACED.sub("", _NODES.sub(")", _LINE.sub("", text)))
    symbols = _numbered(_SYMBOL.findall(text), set(), "{stem}{number}")
    defined = _DEFINED.findall(text)
    others = set(_WORD.findall(text)) - set(defined)
    names = symbols | _numbered(defined, others, "{stem}_{number}")
    groups = {name: f"group{i}" for i, name in enumerate(dict.fromkeys(_GROUP.findall(text)))}
    text = _GROUP.sub(lambda found: groups[found[0]], text)
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text)


def _numbered(names: Iterable[str], taken: set[str], form: str) -> dict[str, str]:
    """Names that differ in a counter at their end, counted anew; a value's first has none, as in FX."""
    seen: Counter[str] = Counter()
    renamed: dict[str, str] = {}
    for name in dict.fromkeys(names):
        stem = _COUNTER.sub("", name)
        number, seen[stem] = seen[stem], seen[stem] + 1
        new = stem if "_" in form and number == 0 else form.format(stem=stem, number=number)
        renamed[name] = name if new in taken else new
    return renamed
