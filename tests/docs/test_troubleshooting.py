"""Each message in the code has its entry in docs/troubleshooting.toml, and the page is made of it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from expecttest import assert_expected_inline

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("troubleshooting", ROOT / "docs/troubleshooting.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_message_has_an_entry(tool: ModuleType) -> None:
    missing = [f"{message.file}: {message.text}" for message in tool.missing()]
    assert not missing, "run `python docs/troubleshooting.py --list` and fill in what it prints"


def test_every_entry_is_of_a_message(tool: ModuleType) -> None:
    known = {message.text for message in tool.messages()}
    assert [text for entry in tool.entries() for text in entry.says if text not in known] == []


def test_every_entry_says_something_once(tool: ModuleType) -> None:
    entries = tool.entries()
    assert all(len(entry.cause) > 20 and len(entry.remedy) > 10 for entry in entries)
    assert [text for text, n in Counter(t for entry in entries for t in entry.says).items() if n > 1] == []


def test_the_page_is_made_of_them(tool: ModuleType) -> None:
    assert (ROOT / "docs/troubleshooting.md").read_text() == tool.page(), "run `python docs/troubleshooting.py`"


SOURCE = """
WHY = "a constant"
TEXTS = {"a": "from a table", "b": f"of {2}"}

REASONS = {1: "number {0} is wrong"}

def describe(x):
    return f"what {x} is"

def fails(x, other):
    if x:
        raise ValueError(f"x is {x}, " "expected 1")
    said = "this way" if x else f"that {x}"
    raise OptionError(said) from None
    raise MokError(WHY)
    raise MokError(TEXTS[x])
    raise MokError(describe(x))
    raise MokError("a" + f"{x} b")
    raise MokError(f"it {'has' if x else 'lacks'} one")
    raise MokError(str(other))
    raise argparse.ArgumentTypeError("not told")

def supports(call):
    return None if call else "the provider's reason"

def passes(tracker):
    reason = "assigned"
    Miss(reason=f"{1} missed", where="", code="", node="")
    return Reason(node, "near miss")
"""


def test_what_is_found_in_a_source(tool: ModuleType) -> None:
    module = tool.Module(ast.parse(SOURCE))
    assert_expected_inline(
        "\n".join(module.messages()),
        """\
number {} is wrong
x is {}, expected 1
this way
that {}
a constant
from a table
of {}
what {} is
a{} b
it has one
it lacks one
the provider's reason
assigned
{} missed
near miss""",
    )
    assert list(module.unread()) == ["MokError"]


def test_what_is_not_found_hands_on_what_others_say(tool: ModuleType) -> None:
    unread = [f"{name}: {exception}" for name, module in tool.files() for exception in module.unread()]
    assert_expected_inline(
        "\n".join(unread),
        """\
mokfx/bench/variants.py: Unavailable
mokfx/capture/proof.py: Unproven
mokfx/capture/session.py: Unproven
mokfx/cli/kernels.py: MokError
mokfx/observe.py: MissError
mokfx/ops/checks.py: ValueError
mokfx/options.py: OptionError
passes/rewrite.py: NotLegal""",
    )
