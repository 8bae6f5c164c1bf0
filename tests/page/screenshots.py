"""Take the pictures of docs/explain.md: python -m tests.page.screenshots. Needs Chromium and Graphviz."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from mokfx.cli import main

from .test_browser import PROGRAM

ROOT = Path(__file__).parent.parent.parent
MODELS = "tests/page/models.py"
SHOTS = {
    "explain-quickstart": ("examples/quickstart.py:make", 1280, 1500, "light", "header", ""),
    "explain-ranks": (f"{MODELS}:deepseek_like", 1280, 1150, "light", ".pictures", "expert outputs, received"),
    "explain-near-miss": (f"{MODELS}:match_and_misses", 1280, 1120, "light", "#miss-1", ""),
    "explain-dark": (f"{MODELS}:match_and_misses", 1280, 1120, "dark", "header", ""),
    "explain-phone": ("examples/quickstart.py:make", 390, 1300, "dark", "header", ""),
}
"""Name -> factory, width and height of the window, colour scheme, what is at its top, and the box that is chosen."""


def take(
    browser: Browser, page: Path, to: Path, width: int, height: int, scheme: str, top: str, chosen: str
) -> None:
    """One picture of a page, of the size of the window."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    opened = context.new_page()
    opened.goto(page.as_uri())
    if chosen:
        opened.locator(f'.graph a[aria-label*="{chosen}"]').first.focus()
    opened.locator(top).first.evaluate("element => element.scrollIntoView()")
    opened.screenshot(path=to)
    context.close()


def run() -> int:
    """Explain each model, and take its pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for name, (factory, *shot) in SHOTS.items():
            page = Path(folder) / f"{name}.html"
            if main(["explain", factory, "--html", str(page)]) != 0:
                return 1
            take(browser, page, ROOT / "docs" / "pictures" / f"{name}.png", *shot)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(run())
