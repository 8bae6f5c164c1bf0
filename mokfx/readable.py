"""The code of a graph, for people and for tests that pin it."""

from __future__ import annotations

import re
import textwrap

from torch.fx import GraphModule

WIDTH = 100
_FREED = re.compile(r";  (\w+ = )+None")
_ALIAS = re.compile(r"\s*(\w+) = (\w+)")
_SIGNATURE = re.compile(r"(\s*)def forward\(self, (.*)\):")
_NOISE = re.compile(
    r"^L_(self_|s_|fn_)?|(?<=_)(modules|parameters|buffers|dict)_|^(modules|parameters|buffers)_|_$", re.I
)


def readable(gm: GraphModule) -> str:
    """The graph's code with dtypes and shapes, and nothing that differs between machines or runs.

    Left out of what FX prints are comments (they hold paths), blank lines, the `x = None` by which
    generated code frees its variables, and Dynamo's words in the names of inputs:
    `L_self_modules_w_parameters_weight_` is `w_weight`.
    """
    lines = [_FREED.sub("", line).rstrip() for line in gm.print_readable(print_output=False).splitlines()]
    lines = [line for line in lines if line and not line.lstrip().startswith("#")]
    names, aliases = _short_names(lines)
    text = [_rename(line, names) for line in lines if line not in aliases]
    return "\n".join(part for line in text for part in _wrapped(line))


def short_name(name: str) -> str:
    """The name of an input or parameter without Dynamo's words in it."""
    short = _NOISE.sub("", name)
    if short[:1].isdigit():  # of a Sequential
        return f"module_{short}"
    return short or name


def _short_names(lines: list[str]) -> tuple[dict[str, str], set[str]]:
    """A new name for each input of the graph, and the lines that only give an input a second name."""
    taken = {word for line in lines for word in re.findall(r"\w+", line)}
    names: dict[str, str] = {}
    aliases: set[str] = set()
    for line in lines:
        if (alias := _ALIAS.fullmatch(line)) and alias[2].startswith("L_"):
            short = short_name(alias[2])
            if short in taken:
                short = alias[1]
            taken.add(short)
            aliases.add(line)
            names[alias[1]] = names[alias[2]] = short
    return names, aliases


def _rename(line: str, names: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)


def _wrapped(line: str) -> list[str]:
    """The line in pieces of readable width; of a long signature, each parameter on a line of its own."""
    if len(line) <= WIDTH:
        return [line]
    indent = re.match(r"\s*", line)[0]  # type: ignore[index]
    if signature := _SIGNATURE.fullmatch(line):
        parameters = re.split(r', (?=(?:[^"]*"[^"]*")*[^"]*$)', signature[2])  # not inside "f32[4, 8]"
        return [f"{indent}def forward(", *(f"{indent}    {p}," for p in ("self", *parameters)), f"{indent}):"]
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent + "    ", break_long_words=False, break_on_hyphens=False
    )
