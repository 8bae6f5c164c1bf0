"""Take the pictures of docs/explain.md: python -m tests.page.screenshots. Needs Chromium and Graphviz."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ViewportSize, sync_playwright

from mokfx.cli import main

from .test_browser import PROGRAM

ROOT = Path(__file__).parent.parent.parent
MODELS = "tests/page/models.py"
@dataclass(frozen=True)
class Shot:
    """One picture: of the page of a factory, in a window of this size and colour scheme."""

    factory: str
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"
    top: str = "header"
    """What is at the top of the window."""
    chosen: str = ""
    """Words of the box that is chosen."""


SHOTS = {
    "explain-quickstart": Shot("examples/quickstart.py:make", 1280, 1500),
    "explain-ranks": Shot(
        f"{MODELS}:deepseek_like", 1280, 1150, top=".pictures", chosen="expert outputs, received"
    ),
    "explain-near-miss": Shot(f"{MODELS}:match_and_misses", 1280, 1120, top="#miss-1"),
    "explain-dark": Shot(f"{MODELS}:match_and_misses", 1280, 1120, "dark"),
    "explain-phone": Shot("examples/quickstart.py:make", 390, 1300, "dark"),
}


def take(browser: Browser, page: Path, shot: Shot, to: Path) -> None:
    """Take one picture of a page."""
    size = ViewportSize(width=shot.width, height=shot.height)
    context = browser.new_context(viewport=size, color_scheme=shot.scheme)
    opened = context.new_page()
    opened.goto(page.as_uri())
    if shot.chosen:
        opened.locator(f'.graph a[aria-label*="{shot.chosen}"]').first.focus()
    opened.locator(shot.top).first.evaluate("element => element.scrollIntoView()")
    opened.screenshot(path=to)
    context.close()


def run() -> int:
    """Explain each model, and take its pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            page = Path(folder) / f"{name}.html"
            if main(["explain", shot.factory, "--html", str(page)]) != 0:
                return 1
            take(browser, page, shot, ROOT / "docs" / "pictures" / f"{name}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(run())
