"""The page as a person uses it, in a real Chromium: upload, corrupt, prune, read, on a phone and without a mouse."""

import re
from pathlib import Path
from typing import Any

import pytest
from page_tools import Visit, answered, ask, corrupt, inspect, mark_old, open_results, open_tab, tick
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("app")]


def test_page_opens_with_an_answer_above_the_fold(visit: Visit) -> None:
    """Measured before the page is served: no click, no request."""
    page = visit()
    assert page.locator(".cl-status").inner_text() == "Expected answer: 5"
    cards = page.locator("#answers .cl-card:visible")
    assert [card.get_attribute("data-method") for card in cards.all()] == ["none", "clustermeans"]
    for card, tokens in zip(cards.all(), (576, 64), strict=True):
        right = card.locator(".cl-text").inner_text() == "5"
        assert card.locator(".cl-mark").inner_text().endswith("right" if right else "wrong")
        assert f"{tokens} of 576" in card.inner_text()
        assert card.locator("img").evaluate("image => image.naturalWidth") > 200
        box = card.bounding_box()
        assert box["y"] + box["height"] < 900
    for part in ("#question", "#ask", "#preview", "#samples"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] < 900, part
    image, result = (page.locator(part).bounding_box() for part in ("#preview", "#result"))
    assert image["x"] + image["width"] <= result["x"]
    assert not page.locator("#methods").is_visible()


def test_sample_is_asked_and_the_answers_are_marked(visit: Visit) -> None:
    page = visit()
    tick(page, "ClustRS", "DivPrune")
    ask(page)
    cards = page.locator("#answers .cl-card:visible")
    methods = ["none", "clustermeans", "clustrs", "divprune"]
    assert sorted(card.get_attribute("data-method") for card in cards.all()) == sorted(methods)
    first = cards.nth(0).inner_text()
    assert "576 of 576" in first
    assert "selection" not in first
    for card in cards.all()[1:]:
        text = card.inner_text()
        assert re.search(r"64 of 576\s+\u221289 %", text)
        assert re.search(r"First token\s+\d+ ms", text)
        assert re.search(r"encoder [\d.]+ \+ selection [\d.]+ \+ prefill [\d.]+ ms", text)
        assert re.search(r"KV cache\s+[\d.]+ kB\s+\u22128\d %", text)
        assert ("right" in text) != ("wrong" in text)


def test_sample_and_question_are_answered_with_a_click_each(visit: Visit) -> None:
    page = visit()
    page.get_by_role("button", name="Sample scene-2").click()
    page.locator("#preview figcaption", has_text="scene-2.png").wait_for()
    page.locator(".cl-status", has_text="Expected answer: right").wait_for()
    page.get_by_role("button", name="What colour is the star?").click()
    page.locator(".cl-status", has_text="Expected answer: red").wait_for()
    assert page.locator("#question textarea").input_value() == "What colour is the star?"


def test_no_card_is_left_unfinished(visit: Visit) -> None:
    """Updates come faster than a browser draws them."""
    page = visit()
    for number in (2, 3, 4, 5, 6, 1):
        mark_old(page)
        page.get_by_role("button", name=f"Sample scene-{number}").click()
        answered(page)
        page.wait_for_function("!document.querySelector('#answers .cl-wait, #answers .cl-cursor')", timeout=5000)
        assert page.locator("#answers .cl-mark").count() == 2


def test_answers_to_earlier_settings_are_marked_until_asked_again(visit: Visit) -> None:
    page = visit()
    assert page.locator("#answers.cl-outdated").count() == 0
    page.locator("#keep input[type=number]").fill("16")
    page.locator("#keep input[type=number]").press("Enter")
    page.locator("#answers.cl-outdated").wait_for()
    ask(page)
    assert page.locator("#answers.cl-outdated").count() == 0


def test_k_is_chosen_and_no_method_is_fine(visit: Visit) -> None:
    page = visit()
    page.locator("#keep input[type=number]").fill("16")
    page.locator("#keep input[type=number]").press("Enter")
    ask(page)
    page.locator("#answers .cl-card", has_text="16 of 576").wait_for()
    tick(page)
    page.get_by_role("checkbox", name="ClusterMeans", exact=True).uncheck()
    ask(page)
    assert page.locator("#answers .cl-card:visible").count() == 1


def test_right_answers_are_counted_over_noise_draws(visit: Visit) -> None:
    page = visit()
    page.locator("#draws").click()
    page.locator("#drawn .cl-notice", has_text="Choose a corruption first").wait_for()
    corrupt(page, "gaussian")
    page.locator("#draws").click()
    page.locator("#drawn", has_text="Right in 20 noise draws (gaussian:0.18, seeds 0 to 19)").wait_for()
    for name in ("Unpruned", "ClusterMeans"):
        assert re.search(rf"{name}: \d+ of 20", page.locator("#drawn").inner_text())


def test_upload_is_corrupted_pruned_and_answered(visit: Visit, tmp_path: Path) -> None:
    Image.new("RGB", (200, 120), "teal").save(tmp_path / "mine.png")
    page = visit()
    mark_old(page)
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "mine.png")
    page.locator("#preview figcaption", has_text="mine.png").wait_for()
    answered(page, "No answer is known")
    clean = page.locator("#preview img").get_attribute("src")
    corrupt(page, "salt_pepper")
    assert page.locator("#preview figcaption").inner_text() == "mine.png, salt_pepper:0.1, seed 0"
    assert page.locator("#preview img").get_attribute("src") != clean
    page.locator("#level input[type=number]").fill("0.3")
    page.locator("#level input[type=number]").press("Enter")
    page.locator("#preview figcaption", has_text="salt_pepper:0.3").wait_for()
    page.locator("#question textarea").fill("What colour is it?")
    ask(page)
    assert page.locator(".cl-status").inner_text() == "No answer is known for this question"
    warning = "not in the model's vocabulary: 'it': read as unknown, so the answers may mean nothing."
    assert page.locator("#status .cl-notice").inner_text() == warning
    assert page.locator("#answers .cl-mark").count() == 0
    page.wait_for_function("[...document.querySelectorAll('#answers .cl-text')].every(text => text.innerText.trim())")


def test_upload_that_is_no_image_is_refused_and_the_image_stays(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("these are notes")
    page = visit()
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "notes.png")
    toast = page.locator("[data-testid=toast-body]").first
    toast.wait_for()
    assert "This file was refused. Image 'notes.png': not an image in any format" in toast.inner_text()
    assert "/tmp" not in toast.inner_text()
    assert page.locator("#answers .cl-card:visible").count() == 2
    assert page.locator("#preview figcaption").inner_text() == "scene-1.png"


def test_enormous_upload_is_refused(visit: Visit, tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    page = visit()
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "huge.png")
    page.locator("[data-testid=toast-body]", has_text="too large, 9000 x 9000").wait_for()


def test_file_of_too_many_bytes_is_refused_with_a_line(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "big.png").write_bytes(b"\x89PNG" + bytes(21_000_000))
    page = visit()
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "big.png")
    toast = page.locator("[data-testid=toast-body]").first
    toast.wait_for()
    assert re.search("size|large", toast.inner_text())
    assert page.locator("#preview figcaption").inner_text() == "scene-1.png"


def test_error_is_a_line_and_leaves_no_card(visit: Visit) -> None:
    page = visit()
    page.locator("#question textarea").fill("")
    page.locator("#ask").click()
    line = page.locator("#status .cl-notice")
    line.wait_for()
    assert line.inner_text() == "Question must not be empty."
    assert page.locator("#answers .cl-card").count() == 0
    page.locator("#question textarea").fill("How many objects are there?")
    ask(page)
    assert page.locator("#answers .cl-card:visible").count() == 2


def test_phone_is_led_to_the_result(visit: Visit) -> None:
    page = visit(viewport={"width": 420, "height": 800})
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.locator("#question textarea").fill("What colour is the triangle?")
    ask(page)
    top = "document.querySelector('#result').getBoundingClientRect().top"
    at_result = f"{top} > -5 && {top} < innerHeight / 2"
    page.wait_for_function(at_result)  # it scrolls smoothly
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.get_by_role("button", name="Sample scene-2").click()
    page.wait_for_function(at_result)


def test_everything_in_try_has_a_name(visit: Visit) -> None:
    page = visit()
    names = page.locator("#samples button").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert names == [f"Sample scene-{i + 1}" for i in range(len(names))]
    assert page.get_by_role("textbox", name="Question").count() == 1
    assert page.get_by_role("status").count() >= 1
    assert page.locator("#answers img:not([alt]), #preview img:not([alt])").count() == 0


def test_whole_trial_works_without_a_mouse(visit: Visit) -> None:
    page = visit()
    mark_old(page)
    page.locator("#question textarea").focus()
    page.keyboard.press("Enter")
    answered(page)
    tick(page)
    wanted = {
        "#question",
        "#ask",
        "#known",
        "#samples",
        "#upload",
        "#corruption",
        "#keep",
        "#draws",
        "#methods",
        "#seed",
    }
    reached: set[str] = set()
    page.locator("#question textarea").focus()
    for _ in range(60):
        reached |= {one for one in wanted if page.evaluate(f"!!document.activeElement.closest('{one}')")}
        page.keyboard.press("Tab")
    assert wanted - reached == set()
    page.locator("#samples button").nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("#preview figcaption", has_text="scene-2.png").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1400])
def test_nothing_is_wider_than_the_window(visit: Visit, width: int, scheme: str) -> None:
    page = visit(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wide = "document.documentElement.scrollWidth - window.innerWidth"
    assert page.evaluate(wide) <= 0
    inspect(page)
    assert page.evaluate(wide) <= 0
    open_tab(page, "Tune")
    page.locator("#tune").wait_for()
    assert page.evaluate(wide) <= 0
    open_results(page)
    assert page.evaluate(wide) <= 0
    clipped = """all => all.filter(one => one.scrollWidth > one.clientWidth + 1
        && !['auto', 'scroll'].includes(getComputedStyle(one.parentElement).overflowX)).map(one => one.outerHTML)"""
    assert page.locator("table").evaluate_all(clipped) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3]))
    assert brightness > 600 if scheme == "light" else brightness < 200


CONTRASTS = """() => {
    const parts = color => color.match(/[\\d.]+/g).map(Number);
    const over = (above, below) => below.map((value, i) => above[i] * (above[3] ?? 1) + value * (1 - (above[3] ?? 1)));
    const luminance = color => color.map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
    const faint = [];
    for (const one of document.querySelectorAll('body *')) {
        const texts = [...one.childNodes].filter(node => node.nodeType === 3 && node.textContent.trim());
        if (!one.offsetParent || !texts.length) continue;
        const behind = [];
        for (let at = one; at; at = at.parentElement) behind.unshift(parts(getComputedStyle(at).backgroundColor));
        const back = behind.reduce((below, above) => over(above, below), [255, 255, 255]);
        const front = over(parts(getComputedStyle(one).color), back);
        const [dark, light] = [back, front].map(luminance).sort((a, b) => a - b);
        if ((light + 0.05) / (dark + 0.05) < 4.5) faint.push(one.textContent.trim());
    }
    return faint;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(visit: Visit, scheme: str) -> None:
    """By at least 4.5 : 1, as WCAG 2.2 asks of small texts (level AA)."""
    page = visit(color_scheme=scheme)
    assert page.evaluate(CONTRASTS) == []
    inspect(page)
    assert page.evaluate(CONTRASTS) == []
    open_tab(page, "Tune")
    page.locator("#tune").wait_for()
    assert page.evaluate(CONTRASTS) == []
    open_results(page)
    assert page.evaluate(CONTRASTS) == []


def test_no_request_leaves_the_machine(visit: Visit, chromium: Any, address: str) -> None:
    context = chromium.new_context()
    context.set_default_timeout(120_000)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))

    def local_only(route: Any) -> None:
        route.continue_() if route.request.url.startswith((address, "data:", "blob:")) else route.abort()

    context.route("**/*", local_only)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.locator("#ask").wait_for()
    ask(page)
    inspect(page)
    open_results(page)
    context.close()
    assert len(asked) > 10
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert problems == []


def test_page_may_load_from_its_own_server_alone(visit: Visit) -> None:
    """Whatever a page is made to ask for, the policy keeps a browser from asking others."""
    page = visit()
    refused = page.evaluate("""async () => {
        const refused = [];
        addEventListener('securitypolicyviolation', event => refused.push(event.blockedURI));
        const image = new Image();
        image.src = 'http://example.com/x.png';
        await fetch('http://example.com/').catch(() => null);
        await new Promise(done => setTimeout(done, 300));
        return refused;
    }""")
    assert any("example.com" in uri for uri in refused)
    assert len(refused) >= 2


def test_visitors_wait_in_line_and_are_told(visit: Visit, loaded: Any) -> None:
    first, second = visit(), visit()
    for page in (first, second):
        mark_old(page)
    with loaded.lock:
        first.locator("#ask").click()
        first.locator(".cl-wait").first.wait_for()
        second.locator("#ask").click()
        told = second.locator("#status", has_text=re.compile("queue", re.IGNORECASE))
        told.wait_for()
    for page in (first, second):
        answered(page)


def test_files_outside_of_the_page_are_not_served(visit: Visit, address: str, library_folder: Path) -> None:
    page = visit()
    for path in ("/etc/passwd", str(library_folder / "scenes-run" / "config.json"), str(Path(__file__))):
        response = page.request.get(f"{address}gradio_api/file={path}")
        assert response.status in (403, 404)
