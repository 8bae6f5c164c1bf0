"""The page in a real browser: wide and narrow, light and dark, by mouse and by keyboard, with and without script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mokfx import Report

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
PAGES = ("deepseek_like", "match_and_misses", "misses_only", "dense")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(report_of: Callable[[str], Report], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name in PAGES:
        report_of(name).html(folder / f"{name}.html", title=f"models:{name}")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture
def visit(browser: Any, written: dict[str, Path]) -> Callable[..., Any]:
    """Open a page; fails if it asks for anything from elsewhere, or the console has an error."""

    @contextmanager
    def opened(name: str, screen: str = "desktop", scheme: str = "light", script: bool = True) -> Iterator[Any]:
        width, height = SCREENS[screen]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=script
        )
        page = context.new_page()
        asked: list[str] = []
        wrong: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(written[name].as_uri())
        yield page
        assert [url for url in asked if not url.startswith("data:")] == [written[name].as_uri()]
        assert wrong == []
        context.close()

    return opened


def color(page: Any, selector: str, what: str) -> tuple[float, ...]:
    """A computed colour as (red, green, blue), each 0 to 1."""
    text = page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{what}")
    numbers = [float(number) for number in re.findall(r"[\d.]+", text.partition("(")[2])]
    return tuple(numbers[:3]) if text.startswith("color(") else tuple(number / 255 for number in numbers[:3])


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(rgb: tuple[float, ...]) -> float:
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows(visit: Open, name: str, screen: str, scheme: str) -> None:
    with visit(name, screen, scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == SCREENS[screen][0]
        ink, paper = color(page, "body", "color"), color(page, "body", "backgroundColor")
        assert contrast(ink, paper) > 12
        assert (sum(paper) > sum(ink)) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_their_ground(visit: Open, scheme: str) -> None:
    with visit("deepseek_like", scheme=scheme) as page:
        card = color(page, "details.layer", "backgroundColor")
        for stage in ("router", "dispatch", "experts", "shared", "combine"):
            chip = f".facts .chip.{stage}"
            assert contrast(color(page, chip, "color"), color(page, chip, "backgroundColor")) >= 4.5, stage
            band = f".band.{stage}"
            assert contrast(color(page, f"{band} text", "fill"), color(page, f"{band} rect", "fill")) >= 4.5, stage
        for part in (".note", ".facts dt", ".graph .node .where"):
            what = "fill" if part.startswith(".graph") else "color"
            assert contrast(color(page, part, what), card) >= 4.5, part
        op = ".graph .node.op"
        assert contrast(color(page, f"{op} text", "fill"), color(page, f"{op} rect", "fill")) >= 7


@pytest.mark.parametrize("name", ["deepseek_like", "match_and_misses"])
def test_text_fits_its_box(visit: Open, name: str) -> None:
    with visit(name) as page:
        page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        too_wide = page.evaluate(
            """[...document.querySelectorAll('.graph .node')].filter(node => {
                const box = node.querySelector('rect:not(.behind)').getBBox();
                return [...node.querySelectorAll('text')].some(text => {
                    const own = text.getBBox();
                    return own.x < box.x || own.x + own.width > box.x + box.width
                        || own.y < box.y || own.y + own.height > box.y + box.height;
                });
            }).map(node => node.getAttribute('aria-label'))"""
        )
        assert too_wide == []
        assert page.locator(".graph .node").count() > 60


@pytest.mark.parametrize("screen", SCREENS)
def test_text_is_large_enough_to_read(visit: Open, screen: str) -> None:
    with visit("deepseek_like", screen) as page:
        heights = page.evaluate(
            "[...document.querySelectorAll('.graph .node .says')].map(text => text.getBoundingClientRect().height)"
        )
        assert min(heights) > 8
        assert page.locator(".node.input").first.is_visible()


def test_a_box_is_read_by_keyboard(visit: Open) -> None:
    with visit("deepseek_like") as page:
        page.locator(".view").first.focus()
        page.keyboard.press("Tab")
        inspect = page.locator(".inspect").first
        assert "the layer's input: the tokens" in inspect.inner_text()
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("x, inputs, the layer's")
        assert page.locator(".graph .edge.hot").count() > 0
        page.keyboard.press("Tab")
        assert "the layer's input" not in inspect.inner_text()
        inspect.get_by_role("link", name="in the table").click()
        row = page.locator("tr:target")
        assert row.is_visible()
        assert "token by token" in row.inner_text()


def test_zoom(visit: Open) -> None:
    with visit("deepseek_like", "phone") as page:
        figure = page.locator(".picture").first
        graph, view = figure.locator("svg"), figure.locator(".view")

        def width() -> float:
            return float(graph.evaluate("svg => svg.getBoundingClientRect().width"))

        assert width() > view.evaluate("view => view.clientWidth")  # it scrolls, rather than be too small to read
        before = width()
        figure.get_by_role("button", name="Larger").click()
        assert width() == pytest.approx(1.25 * before, abs=0.1)
        figure.get_by_role("button", name="Smaller").click()
        assert width() == pytest.approx(before, abs=0.1)
        figure.get_by_role("button", name="Fit").click()
        assert width() <= view.evaluate("view => view.clientWidth")


def test_the_card_is_chosen(visit: Open) -> None:
    with visit("deepseek_like") as page:
        best = page.locator(".work tbody strong:visible").first
        assert best.inner_text() == "15.8 \u00b5s"
        page.get_by_label("Floors on").select_option("B200")
        assert best.inner_text() == "6.85 \u00b5s"


def test_a_near_miss_shows_where_understanding_ended(visit: Open) -> None:
    with visit("match_and_misses") as page:
        page.locator("#miss-1 .view").evaluate("view => view.scrollIntoView()")
        ended = page.locator("#miss-1 .node.ended")
        assert ended.get_attribute("aria-label").startswith("cumsum, understanding ended here")
        seen, frame = ended.bounding_box(), page.locator("#miss-1 .view").bounding_box()
        assert frame["y"] < seen["y"] < frame["y"] + frame["height"]


def test_it_can_be_read_without_script(visit: Open) -> None:
    with visit("match_and_misses", "phone", script=False) as page:
        assert page.locator("#layer-1-before-0").is_visible()
        assert page.locator(".graph .says", has_text="the MoE of x").first.is_visible()
        assert page.locator("[data-card]:visible").count() > 0
