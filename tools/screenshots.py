"""Take the screenshots of docs/app.md and docs/evaluation.md: every tab and the report at two widths, light and dark.

    python tools/screenshots.py RUNS

RUNS is a folder with one run of the embedded model, such as that of `make demo`, reported with `--images` and
`--latency`. Needs what `make test-app` sets up.
"""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from clustrs.app import launch

OUTPUT = Path(__file__).parent.parent / "docs" / "images"
QUALITY = 88
"""Of the WebP files."""
DISAGREEMENTS = "Where methods disagree"
"""The section of the report with the tokens that methods kept."""


def main(runs: str) -> None:
    (report,) = Path(runs).resolve().glob("*/report.html")
    page, address = launch(runs=runs, port=None, browser=False, block=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in (1400, 420):
            for scheme in ("light", "dark"):
                shoot(browser, address, width, scheme)
                shoot_report(browser, report.as_uri(), width, scheme)
        browser.close()
    page.close()


def shoot(browser: Any, address: str, width: int, scheme: str) -> None:
    """Walk through the tabs as a visitor would."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(address)
    page.locator("#answers img").first.wait_for()
    store(page, f"app-try-{width}-{scheme}")
    page.get_by_role("tab", name="Inspect").click()
    page.locator(".cl-image").first.wait_for()
    store(page, f"app-inspect-{width}-{scheme}")
    page.get_by_role("tab", name="Results").click()
    page.locator("#disagreements button").first.click()
    page.locator("#disagreement img").first.wait_for()
    store(page, f"app-results-{width}-{scheme}")
    page.get_by_role("tab", name="Tune").click()
    page.get_by_role("button", name="Tune", exact=True).click()
    page.locator("#tuned .cl-headline").wait_for()
    store(page, f"app-tune-{width}-{scheme}")
    context.close()


def shoot_report(browser: Any, address: str, width: int, scheme: str) -> None:
    """The report before anything is unfolded, with the numbers under the pointer; and the disagreements."""
    context = browser.new_context(viewport={"width": width, "height": 1350}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.locator("figure .panel svg").first.hover()
    store(page, f"report-{width}-{scheme}")
    page.get_by_role("heading", name=DISAGREEMENTS).click()
    page.evaluate("scrollTo(0, 0)")
    section = page.locator("details", has=page.get_by_role("heading", name=DISAGREEMENTS)).bounding_box()
    store(page, f"report-disagreements-{width}-{scheme}", section["y"], section["y"] + section["height"])
    context.close()


def store(page: Any, name: str, start: float = 0, end: float | None = None) -> None:
    """Keep a page, or what lies between two heights."""
    page.wait_for_timeout(500)
    image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    image = image.crop((0, round(start), image.width, image.height if end is None else round(end)))
    path = OUTPUT / f"{name}.webp"
    image.save(path, quality=QUALITY, method=6)
    print(f"{path.name}: {path.stat().st_size} bytes, {image.width} x {image.height}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
