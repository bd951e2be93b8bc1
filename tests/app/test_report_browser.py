"""The report's page in a real browser: numbers on hover, curves that hide, no request, readable at any width."""

from pathlib import Path
from typing import Any

import pytest
from recorded_run import write_run

from clustrs.evaluation.report import write_report

UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("browser")))


def test_curves_show_their_numbers_and_can_be_hidden(chromium: Any, report: Path) -> None:
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(report.as_uri())
    panel = page.locator(".panel").first
    panel.scroll_into_view_if_needed()
    assert not panel.locator(".numbers").is_visible()
    panel.locator("svg").hover()
    numbers = panel.locator(".numbers")
    assert numbers.is_visible()
    assert numbers.locator("b").inner_text() in ("4", "8"), "tokens"
    assert [text.split(":")[0] for text in numbers.locator("span").all_inner_texts()] == [
        "FasterVLM",
        "ClustRS",
        "unpruned",
    ]
    entry = page.locator(".legend li").nth(1)
    entry.focus()
    page.keyboard.press("Enter")
    assert entry.get_attribute("aria-checked") == "false"
    assert not panel.locator('[data-curve="1"]').is_visible()
    panel.locator("svg").hover(position={"x": 200, "y": 100})
    assert len(numbers.locator("span").all_inner_texts()) == 2
    entry.click()
    assert panel.locator('[data-curve="1"]').is_visible()
    assert requests == [report.as_uri()]
    assert problems == []
    page.close()


def test_a_folded_report_is_short_and_unfolds(chromium: Any, report: Path) -> None:
    for width in (420, 1400):
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.goto(report.as_uri())
        assert page.evaluate("document.documentElement.scrollHeight") <= 3000
        assert page.locator(".headline").bounding_box()["y"] < 300
        assert not page.locator("table").first.is_visible()
        heading = page.get_by_role("heading", name="Scores", exact=True)
        heading.click()
        assert page.locator("table", has_text="Clean images").first.is_visible()
        page.close()
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.goto(report.as_uri())
    panels = [panel.bounding_box() for panel in page.locator("section .panel").all()]
    assert panels[0]["y"] == panels[1]["y"]
    assert sum(panel["width"] for panel in panels) > 1200, "the chart uses the width"
    page.close()


@pytest.mark.parametrize("width", [420, 1400])
def test_it_is_as_wide_as_the_window_and_headings_stay_whole(chromium: Any, report: Path, width: int) -> None:
    """Tables scroll inside the page, which does not; no heading is broken into single letters."""
    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    heads = page.evaluate(
        "[...document.querySelectorAll('th')].filter(h => h.clientHeight)"
        ".map(h => [h.textContent, h.clientWidth, h.clientHeight])"
    )
    assert heads
    clipped = "[...document.querySelectorAll('.wide')].filter(one => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(clipped) == 0
    for text, wide, high in heads:
        assert wide > 20 or len(text) < 4, text
        assert high < 160, text
    legend = page.evaluate(
        "[...document.querySelectorAll('.legend li')].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert all(0 <= left < right <= width for left, right in legend)
    page.close()


def test_dark_and_light(chromium: Any, report: Path) -> None:
    """Text stands out from the page in both schemes, also the unpruned model's curve, which is black on white."""
    for scheme, dark in (("light", False), ("dark", True)):
        page = chromium.new_page(color_scheme=scheme)
        page.goto(report.as_uri())
        colors = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            " getComputedStyle(document.querySelector('[data-curve=\"2\"] .line')).stroke]"
        )
        background, text, unpruned = (sum(map(int, color[4:-1].split(","))) / 3 for color in colors)
        assert (background < 60) == dark
        assert (text > 200) == dark
        assert text == unpruned
        ours = page.evaluate("getComputedStyle(document.querySelector('[data-curve=\"1\"] .line')).stroke")
        assert ours == ("rgb(42, 143, 214)" if dark else "rgb(0, 114, 178)")
        page.close()


def test_it_is_whole_without_its_script(chromium: Any, report: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator(".panel svg .mark").count() == 2 * 3 * 2 + 2 * 2 * 3 * 3
    assert page.locator(".numbers").count() == 0
    context.close()


def test_a_click_on_a_heading_sorts_the_table(chromium: Any, report: Path) -> None:
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.goto(report.as_uri())
    page.evaluate(UNFOLD)
    table = page.locator("table", has_text="Cost and score")
    head = table.locator("thead th", has_text="clean score")
    column = head.evaluate("head => head.cellIndex")

    def numbers() -> list[float]:
        return [float(text) for text in table.locator(f"tbody tr > :nth-child({column + 1})").all_inner_texts()]

    before = numbers()
    head.click()
    assert numbers() == sorted(before, reverse=True) != before
    assert head.get_attribute("aria-sort") == "descending"
    head.focus()
    page.keyboard.press("Enter")
    assert numbers() == sorted(before)
    grouped = page.locator("table:has(tr.opens) thead th").first
    assert grouped.get_attribute("aria-sort") is None
    page.close()
