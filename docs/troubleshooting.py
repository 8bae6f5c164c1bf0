"""Find every message of mokfx in its source, and write docs/troubleshooting.md from the catalogue beside it.

    python docs/troubleshooting.py           write docs/troubleshooting.md
    python docs/troubleshooting.py --list    print each message without an entry, as an entry to fill in

A message is a text that a user can be told: of an exception that is raised, of a `Miss`, of a refusal of the pass, or
of a provider's reason. It is found as it stands in the code, with {} for each value in it. The catalogue,
docs/troubleshooting.toml, says for each what causes it and what to do; one entry may be about several messages.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("mokfx", "passes", "kernels")
LINKS = ("mokfx/passes", "mokfx/kernels")
TELLS = {"Miss": 0, "Reason": 1, "refuse": 2, "warn": 0, "Refusal": 0, "problem": 1}
"""Functions that are given a message, and which argument it is."""
QUIET = frozenset(("ArgumentTypeError", "StopIteration", "SystemExit", "KeyError"))
"""Exceptions whose text no user is told, or is told beside the usage of a command."""
REASONS = ("reason", "supports", "unavailable", "unreadable", "why", "doubt", "_other_side", "_changed_objects")
"""Parts of the names of functions that return a message, or None or "" for none."""


@dataclass(frozen=True)
class Message:
    text: str
    """As in the code, with {} for each value."""
    file: str


@dataclass(frozen=True)
class Entry:
    """What the catalogue says of some messages."""

    part: str
    says: tuple[str, ...]
    cause: str
    remedy: str


@functools.cache
def files() -> tuple[tuple[str, Module], ...]:
    """Each module of the code, under its path."""
    return tuple(_files())


def _files() -> Iterator[tuple[str, Module]]:
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(LINKS):
                yield name, Module(ast.parse(file.read_text()))


@functools.cache
def messages() -> list[Message]:
    """Every message in the code, once, in the order of files and lines."""
    found: dict[str, Message] = {}
    for name, file in files():
        for text in file.messages():
            found.setdefault(text, Message(text, name))
    return list(found.values())


def entries() -> list[Entry]:
    """The catalogue."""
    parts = tomllib.loads((ROOT / "docs/troubleshooting.toml").read_text())
    return [
        Entry(part, tuple(entry["says"]), entry["cause"].strip(), entry["remedy"].strip())
        for part, listed in parts.items()
        for entry in listed
    ]


class Module:
    """One module, whose functions and constants may be parts of messages."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def messages(self) -> Iterator[str]:
        yield from self.tables()
        for scope in [self.tree, *self.functions.values()]:
            for node in _own(scope):
                for expression in self.told(scope, node):
                    for text in self.texts(expression, scope, 0):
                        if text.replace("{}", "").strip(" :;()'`"):
                            yield text

    def tables(self) -> Iterator[str]:
        """The texts of a table REASONS, by number: a kernel can give no more than that."""
        table = self.constants.get("REASONS")
        for value in table.values if isinstance(table, ast.Dict) else ():
            for text in self.texts(value, self.tree, 0):
                yield re.sub(r"\{\d+\}", "{}", text)

    def unread(self) -> Iterator[str]:
        """The exceptions whose message is not found, by name: each hands on what others say."""
        for scope in [self.tree, *self.functions.values()]:
            for node in _own(scope):
                raised = _raised(node)
                if raised is not None and not any(self.texts(argument, scope, 0) for argument in raised.args[:1]):
                    yield _name(raised.func)

    def told(self, scope: ast.AST, node: ast.AST) -> Iterator[ast.expr]:
        """The expressions in a node that are messages."""
        if (raised := _raised(node)) is not None:
            yield from raised.args[:1]
        elif isinstance(node, ast.Call) and (number := TELLS.get(_name(node.func))) is not None:
            yield from [k.value for k in node.keywords if k.arg == "reason"] or node.args[number : number + 1]
        elif isinstance(node, ast.Assign | ast.AugAssign) and _target(node) == "reason":
            yield node.value
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and _name(node.elts[0]) == "assumption":
            yield node.elts[1]  # of mokfx.capture: what was assumed, why it may not hold, and where
        elif isinstance(node, ast.Return) and node.value is not None and _gives_reason(scope):
            yield node.value

    def texts(self, expression: ast.expr, scope: ast.AST, depth: int) -> list[str]:
        """What a text can be; [] for what is none."""
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                pieces = [self.pieces(value, scope, depth) for value in values]
                return ["".join(parts) for parts in product(*pieces)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = [self.texts(side, scope, depth) or ["{}"] for side in (left, right)]
                return ["".join(pair) for pair in product(*sides)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.texts(body, scope, depth), *self.texts(orelse, scope, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.texts(value, scope, depth)]
            case ast.Name(id=name) if depth < 3:
                given = [self.constants[name]] if name in self.constants else list(_assigned(name, scope))
                return [text for value in given for text in self.texts(value, scope, depth + 1)]
            case ast.Subscript(value=ast.Name(id=name)) if isinstance(self.constants.get(name), ast.Dict):
                values = self.constants[name].values  # type: ignore[attr-defined]
                return [text for value in values for text in self.texts(value, scope, depth + 1)]
            case ast.Call(func=ast.Name(id=name)) if name in self.functions and depth < 3:
                function = self.functions[name]
                returns = [n.value for n in _own(function) if isinstance(n, ast.Return) and n.value is not None]
                return [text for value in returns for text in self.texts(value, function, depth + 1)]
        return []

    def pieces(self, value: ast.expr, scope: ast.AST, depth: int) -> list[str]:
        """What a part of an f-string can be: one of two texts of an `if`, else {}."""
        match value:
            case ast.Constant(value=text):
                return [str(text)]
            case ast.FormattedValue(value=ast.IfExp() as choice):
                return self.texts(choice, scope, depth) or ["{}"]
        return ["{}"]


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module that are not in a function inside of it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop(0)
        if not isinstance(node, ast.FunctionDef):
            yield node
            todo = [*ast.iter_child_nodes(node), *todo]


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    for node in _own(scope):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value


def _raised(node: ast.AST) -> ast.Call | None:
    """The exception that a node makes and raises, if someone is told of it."""
    made = node.exc if isinstance(node, ast.Raise) else None
    return made if isinstance(made, ast.Call) and _name(made.func) not in QUIET else None


def _gives_reason(scope: ast.AST) -> bool:
    return isinstance(scope, ast.FunctionDef) and any(part in scope.name for part in REASONS)


def _target(assignment: ast.Assign | ast.AugAssign) -> str:
    return _name(assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def page() -> str:
    """docs/troubleshooting.md."""
    lines = [HEAD]
    part = ""
    for entry in entries():
        if entry.part != part:
            part = entry.part
            lines.append(f"## {part}\n")
        said = "\n>\n".join(f"> {text.replace('{}', '…')}".replace("\n", " ").rstrip() for text in entry.says)
        lines.append(f"{said}\n\n{_filled(entry.cause)}\n\n{_filled(f'*Remedy:* {entry.remedy}')}\n")
    return "\n".join(lines)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)


HEAD = """\
# Troubleshooting

Every reason for which mokfx leaves a layer alone, and every error that it raises: what causes it, and what to do.
… stands for a value. `mokfx.explain(model, *inputs)` says what was left alone, and where; `mokfx doctor` looks at the
machine; `mokfx check module:factory` compares a compiled model with eager and float64.

*Written from `troubleshooting.toml` by `python docs/troubleshooting.py`; a test holds it to the code.*
"""


def missing() -> list[Message]:
    """The messages that have no entry."""
    known = {text for entry in entries() for text in entry.says}
    return [message for message in messages() if message.text not in known]


def main() -> None:
    if "--list" in sys.argv[1:]:
        for message in missing():
            quoted = message.text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            print(f'# {message.file}\nsays = ["{quoted}"]\ncause = """"""\nremedy = """"""\n')
        return
    (ROOT / "docs/troubleshooting.md").write_text(page())


if __name__ == "__main__":
    main()
