"""What the tests of the page share: one loaded model, two runs, and for the browser a running server."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from app_tools import find_chromium, need
from recorded_run import write_run

if TYPE_CHECKING:
    from clustrs.app.trial import LoadedModel

HOSTILE = "${window.touched = 1} {{value}} <img src=x onerror='window.touched = 1'>"


@pytest.fixture(scope="session")
def loaded() -> "LoadedModel":
    from clustrs.app.trial import load_warm

    return load_warm("mini-llava")


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real run of the embedded model, "scenes-run", and an older one with "hostile" texts."""
    from clustrs import Config, run
    from clustrs.evaluation.config import expand_methods

    folder = tmp_path_factory.mktemp("runs")
    config = Config(
        task="scenes",
        model="mini-llava",
        methods=expand_methods(["none", "clustrs", "random"], [4]),
        corruptions=("clean", "gaussian:1"),
        limit=8,
        batch_size=8,
    )
    run(config, folder / "scenes-run")
    write_run(folder / "hostile", lambda rows: [{**row, "text": HOSTILE, "question": HOSTILE} for row in rows])
    os.utime(folder / "hostile" / "answers.jsonl", (0, 0))
    return folder


@pytest.fixture(scope="session")
def tools() -> None:
    """Comes before everything that takes long: nothing is prepared for tests that are skipped."""
    need("gradio", "playwright", chromium=True)


@pytest.fixture(scope="session")
def gradio() -> None:
    need("gradio")


@pytest.fixture(scope="session")
def served(gradio: None, loaded: "LoadedModel", library_folder: Path) -> Iterator[str]:
    """The address of the page, served for the length of the session."""
    from clustrs.app.server import launch

    page, address = launch(loaded, library_folder, port=None, browser=False, block=False)
    yield address
    page.close()


@pytest.fixture(scope="session")
def address(tools: None, served: str) -> str:
    """The address of the page, for a browser."""
    return served


@pytest.fixture(scope="session")
def chromium(tools: None) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page as a visitor of their own would; options are those of a browser context."""
    contexts = []

    def visit(**options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(address)
        page.locator("#ask").wait_for()
        return page

    yield visit
    for context in contexts:
        context.close()
