"""Run the code in a page of docs/, and compare what it prints with what the page says.

    python -m tests.docs.snippets docs/page.md             fails where they differ
    python -m tests.docs.snippets --accept docs/page.md    writes what it prints into the page

A block ```python is run, in one namespace a page; a ```text right after it is what it prints. A block that begins
with a comment `# path/of/a/file.py` is a part of that file of the repository, word for word, with lines `...` between
parts; if there is no such file, it is the name that the block runs under. In a block ```sh, commands of mokfx must be
ones that the console script takes.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r"# ([\w./]+\.py)\n")


class WrongPage(AssertionError):
    """A page says something else than its code does."""


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    begin: int
    """Where the code begins in the page."""


def blocks(page: str) -> list[Block]:
    return [Block(found[1], found[2], found.start(2)) for found in BLOCK.finditer(page)]


def run(path: Path, accept: bool = False) -> int:
    """Run a page; returns how many of its blocks were run, quoted or parsed.

    Raises:
        WrongPage: a block prints something else, quotes something else, or is no command.
    """
    page = path.read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    said: str | None = None
    edits: list[tuple[Block, str]] = []
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(page):
            where = f"{path.name}:{page.count(chr(10), 0, block.begin) + 1}"
            if block.language == "text" and said is not None:
                if said.rstrip() != block.code.rstrip():
                    if not accept:
                        raise WrongPage(f"{where}: the code before it prints\n{said}")
                    edits.append((block, said.rstrip() + "\n"))
                said = None
                continue
            said = None
            if block.language == "python":
                named = NAMED.match(block.code)
                if named and (ROOT / named[1]).exists():
                    quoted(block.code[named.end() :], ROOT / named[1], where)
                else:
                    said = printed(block.code, Path(folder, named[1] if named else f"block{done}.py"), namespace)
            elif block.language == "sh":
                for line in block.code.splitlines():
                    command(line, where)
            done += 1
    for block, text in reversed(edits):
        page = page[: block.begin] + text + page[block.begin + len(block.code) :]
    if edits:
        path.write_text(page)
    return done


def printed(code: str, file: Path, namespace: dict[str, Any]) -> str:
    """What code prints. It is a file of its own, as Dynamo and the reports read its lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    linecache.checkcache(str(file))
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(compile(code, str(file), "exec"), namespace)
    return stream.getvalue()


def quoted(code: str, file: Path, where: str) -> None:
    """Check that each part of a quotation stands in a file."""
    text = file.read_text()
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.M):
        if part.strip("\n") not in text and textwrap.indent(part.strip("\n"), "    ") not in text:
            raise WrongPage(f"{where}: {file.relative_to(ROOT)} has no\n{part}")


def command(line: str, where: str) -> None:
    """Check that a command of mokfx exists, with its options."""
    from mokfx.cli import _parser

    words = shlex.split(line, comments=True)
    if "mokfx" not in words:
        return
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            _parser().parse_args(words[words.index("mokfx") + 1 :])
    except SystemExit:
        raise WrongPage(f"{where}: `{line}`: {said.getvalue()}") from None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--accept":
            print(f"{name}: {run(Path(name), accept='--accept' in sys.argv)} blocks")
