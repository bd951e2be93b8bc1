"""The page as a person uses it, in a real Chromium: upload, corrupt, prune, read, click, open a run, disagree."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("app")]

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


def test_stored_answers_are_text_and_not_programs(visit: Visit) -> None:
    """Neither HTML nor the expressions of Gradio's own templates in a run's files come alive."""
    page = visit()
    open_results(page)
    choose(page, "run", "hostile")
    page.locator("#disagreements button").first.wait_for()
    page.locator("#disagreements button").first.click()
    page.locator("#disagreement .cl-card").first.wait_for()
    for part in ("#disagreements", "#disagreement"):
        text = page.locator(part).inner_text()
        assert "${window.touched = 1}" in text
        assert "{{value}}" in text
        assert "<img src=x" in text
    assert page.evaluate("window.touched") is None


def test_clicked_token_lights_its_cluster_in_both_images(visit: Visit) -> None:
    page = visit()
    corrupt(page, "gaussian")
    inspect(page)
    views = page.locator(".cl-view")
    assert views.count() == 2
    columns = json.loads(views.nth(0).get_attribute("data-tokens"))
    sizes = [columns["cluster"].count(cluster) for cluster in columns["cluster"]]
    kept = [i for i, is_kept in enumerate(columns["kept"]) if is_kept]
    index = max(kept, key=lambda i: sizes[i])
    views.nth(0).locator(f".cl-image [data-i='{index}']").click()
    members = [i for i, cluster in enumerate(columns["cluster"]) if cluster == columns["cluster"][index]]
    assert len(members) > 1
    for drawing in (".cl-image", ".cl-plane"):
        lit = views.nth(0).locator(f"{drawing} .member").evaluate_all("all => all.map(one => Number(one.dataset.i))")
        assert sorted(lit) == members
    box = page.locator(".cl-chosen > div").nth(0)
    assert f"cluster of {len(members)}" in box.inner_text()
    rows = box.locator("tbody tr")
    assert rows.count() == len(members)
    cells = rows.nth(0).locator("td").all_inner_texts()
    assert cells[0].endswith("(kept)")
    names = [name for name in ("score", "distance", "alpha") if any(columns[name][i] is not None for i in members)]
    for text, name in zip(cells[1:], names, strict=True):
        value = columns[name][index]
        assert text == "\u2013" if value is None else float(text) == pytest.approx(value, rel=1e-2)
    assert views.nth(1).locator(".chosen").count() == 2
    assert page.locator(".cl-chosen > div").count() == 2


def test_clusters_are_in_color_at_once(visit: Visit) -> None:
    page = visit()
    inspect(page)
    colors = page.locator(".cl-image rect").evaluate_all(
        "all => new Set(all.map(one => getComputedStyle(one).fill)).size"
    )
    assert colors > 10
    radii = page.locator(".cl-sizes circle").evaluate_all("all => all.map(one => Number(one.getAttribute('r')))")
    assert len(radii) == 64
    assert min(radii) < max(radii)
    assert page.locator("figure img[alt^='Attention of the language model before pruning']").count() == 1
    assert page.locator("figure img[alt^='After pruning']").count() == 1


def test_tuning_ends_with_a_recommendation_and_its_file(visit: Visit, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "teal").save(tmp_path / "mine.png")
    page = visit()
    open_tab(page, "Tune")
    page.locator("#tune-images input[type=file]").set_input_files(tmp_path / "mine.png")
    page.locator("#tune-questions textarea").fill("How many objects are there?")
    page.get_by_role("button", name="Methods and time").click()
    for name in ("ClustRS", "DivPrune"):
        page.locator("#tune-methods").get_by_role("checkbox", name=name, exact=True).uncheck()
    page.locator("#tune-images", has_text="mine").wait_for()
    page.get_by_role("button", name="Tune", exact=True).click()
    page.locator("#tuned .cl-headline").wait_for()
    assert page.locator("#tuned .panel svg").count() == 2
    assert page.locator("#tuned tbody tr").count() == 1 + 5
    with page.expect_download() as download:
        page.locator("#tuned-file").click()
    config = json.loads(Path(download.value.path()).read_text())
    assert config["method"]["name"] == "clustermeans"
    assert str(config["method"]["keep"]) in page.locator("#tuned .cl-headline").inner_text()


def test_tuning_without_a_method_is_one_line(visit: Visit) -> None:
    page = visit()
    open_tab(page, "Tune")
    page.get_by_role("button", name="Methods and time").click()
    for name in ("ClusterMeans", "ClustRS", "DivPrune"):
        page.locator("#tune-methods").get_by_role("checkbox", name=name, exact=True).uncheck()
    page.get_by_role("button", name="Tune", exact=True).click()
    page.locator("#tuned .cl-notice", has_text="Tick at least one method.").wait_for()
    assert not page.locator("#tuned-file").is_visible()


def test_leaderboard_is_shown_and_filtered(visit: Visit) -> None:
    page = visit()
    open_results(page)
    rows = page.locator("#leaderboard tbody tr")
    rows.first.wait_for()
    assert rows.first.locator("th").first.inner_text() == "ClusterMeans"
    before = rows.count()
    choose(page, "board-setting", "as published")
    page.wait_for_function(f"document.querySelectorAll('#leaderboard tbody tr').length < {before}")
    choose(page, "board", "scenes-run")
    page.locator("#leaderboard th", has_text="gaussian:1").wait_for()
    assert {row.locator("th").first.inner_text() for row in rows.all()} == {"ClustRS", "Random"}


def test_point_of_the_plane_is_linked_to_the_image(visit: Visit) -> None:
    page = visit()
    inspect(page)
    point = page.locator(".cl-plane .kept").last
    index = point.get_attribute("data-i")
    point.hover(force=True)
    assert page.locator(f".cl-image [data-i='{index}'].hover").count() == 1
    point.click(force=True)
    assert page.locator(f".cl-image [data-i='{index}'].chosen").count() == 1


def test_methods_of_the_inspection_change(visit: Visit) -> None:
    page = visit()
    inspect(page)
    choose(page, "inspect-method", "DivPrune")
    page.locator(".cl-chosen", has_text="DivPrune forms no clusters").wait_for()
    page.locator(".cl-image .kept").first.click()
    assert page.locator(".cl-image .member").count() == 1


def test_token_is_chosen_with_the_keyboard_alone(visit: Visit) -> None:
    page = visit()
    inspect(page)
    page.locator(".cl-choose").focus()
    page.keyboard.press("Tab")
    focused = "document.activeElement.dataset.i"
    before = page.evaluate(focused)
    assert before is not None
    page.keyboard.press("ArrowDown")
    after = page.evaluate(focused)
    assert after != before
    page.keyboard.press("Enter")
    assert page.locator(f".cl-image [data-i='{after}'].chosen").count() == 1
    page.locator(".cl-choose").select_option(index=2)
    assert page.locator(".cl-image .chosen").count() == 1


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


def test_run_is_opened_and_a_disagreement_found(visit: Visit) -> None:
    page = visit()
    open_results(page)
    assert page.locator("#curves .panel svg").count() == 1
    assert page.locator("#cells button").count() == 2 * 3
    page.locator("#cells button[aria-label^='unpruned under clean']").click()
    page.locator("#cells button[aria-pressed=true]").wait_for()
    page.locator("#disagreements", has_text="under clean").wait_for()
    assert page.locator("#first input").input_value() == "unpruned"
    assert page.locator("#second input").input_value() == "ClustRS"
    page.locator("#disagreements button").first.click()
    cards = page.locator("#disagreement .cl-card")
    cards.first.wait_for()
    assert cards.count() == 2
    assert [card.locator("h3").inner_text() for card in cards.all()] == ["unpruned", "ClustRS"]
    for card in cards.all():
        assert card.locator("img").evaluate("image => image.naturalWidth") > 200
        assert re.search("score [01]", card.inner_text())
    assert "clean" in page.locator(".cl-question").inner_text()


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
