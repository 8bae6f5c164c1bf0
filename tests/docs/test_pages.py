"""The code in the pages of docs/ runs, and does what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .snippets import ROOT, WrongPage, run

PAGES = ("how-it-understands", "adding-a-rule", "adding-a-provider", "determinism", "explain")
GOOD = """\
```python
# first.py
x = 2
print(__file__ if False else x)
```
```text
2
```
Some words.
```python
print(x + 1)
```
```text
3
```
```python
# tests/docs/snippets.py
class WrongPage(AssertionError):
...
    return done
```
```sh
mokfx check my.module:make --tolerance 2    # a comment
pytest -x
```
"""


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str) -> None:
    """In a process of its own, so that names and numbers do not depend on what ran before."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.docs.snippets", f"docs/{page}.md"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout.split()[-2]) >= 2


def test_files_that_pages_name_exist() -> None:
    """With their folder; a bare name may be of another package."""
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.(?:py|md|toml|cu|cuh))?)`", page.read_text()):
            known = name.split("/")[0] in ("mokfx", "passes", "kernels", "tests", "docs", "examples", "benchmarks")
            assert not known or (ROOT / name).exists(), f"{page.name} names {name}"


def test_a_page_whose_code_does_what_it_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    assert run(page) == 4


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("```text\n3\n```", "```text\n4\n```", "page.md:14: the code before it prints\n3"),
        ("class WrongPage(Ass", "class RightPage(Ass", "page.md:17: tests/docs/snippets.py has no\nclass RightPage"),
        ("--tolerance", "--tolerances", "unrecognized arguments: --tolerances"),
        ("mokfx check", "mokfx chek", "invalid choice: 'chek'"),
    ],
)
def test_a_page_that_says_something_else(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD.replace(right, wrong))
    with pytest.raises(WrongPage) as error:
        run(page)
    assert says in str(error.value)


def test_what_is_printed_is_accepted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        GOOD.replace("```text\n3\n```", "```text\nsomething\nelse\n```").replace("```text\n2\n", "```text\n")
    )
    run(page, accept=True)
    assert page.read_text() == GOOD
