"""Steps of a visitor of the page, in a browser."""

import re
from collections.abc import Callable
from typing import Any

Visit = Callable[..., Any]


def choose(page: Any, field: str, option: str) -> None:
    """Choose an option of a drop-down list."""
    page.locator(f"#{field} input").click()
    page.get_by_role("option", name=option, exact=True).click()


def corrupt(page: Any, name: str) -> None:
    choose(page, "corruption", name)
    page.locator("#preview figcaption", has_text=name).wait_for()


def answered(page: Any, text: str = "Expected answer|No answer is known") -> None:
    """Wait for the status of new answers."""
    page.locator(".cl-status:not([data-old])", has_text=re.compile(text)).wait_for()


def mark_old(page: Any) -> None:
    """Tell the status that is there from those that come: the page opens with answers."""
    page.locator(".cl-status").evaluate_all("all => all.forEach(one => one.setAttribute('data-old', ''))")


def ask(page: Any) -> None:
    mark_old(page)
    page.locator("#ask").click()
    answered(page)


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def inspect(page: Any) -> None:
    open_tab(page, "Inspect")
    page.locator(".cl-image").first.wait_for()


def open_results(page: Any) -> None:
    open_tab(page, "Results")
    page.locator("#cells button").first.wait_for()


def tick(page: Any, *names: str) -> None:
    """Unfold the methods and tick some of them."""
    page.get_by_role("button", name="Methods and advanced options").click()
    for name in names:
        page.get_by_role("checkbox", name=name, exact=True).check()
