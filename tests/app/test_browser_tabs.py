"""Inspect, Tune and Results as a person uses them, in a real Chromium."""

import json
import re
from pathlib import Path

import pytest
from page_tools import Visit, choose, corrupt, inspect, open_results, open_tab
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("app")]


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
