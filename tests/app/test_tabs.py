"""The first tab without a browser: what it says beside the answers."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from app_tools import need
from PIL import Image

if TYPE_CHECKING:
    from clustrs.app.trial import LoadedModel
    from clustrs.app.try_tab import TryTab


@pytest.fixture(scope="module")
def tab(loaded: "LoadedModel") -> "TryTab":
    need("gradio")
    from clustrs.app.try_tab import TryTab

    return TryTab(loaded)


def statuses(tab: "TryTab", question: str) -> list[Any]:
    return [update[0] for update in tab.answer(tab.samples[0], "clean", 0, 0, question, ["random"], 4, 2)]


def test_unknown_words_are_named_as_long_as_the_answers_are_there(tab: "TryTab") -> None:
    shown = statuses(tab, "Is there an espresso?")
    assert len(shown) > 2
    for status in shown:
        assert "not in the model&#39;s vocabulary: &#39;espresso&#39;: read as unknown" in status
        assert 'role="alert"' in status
    assert "No answer is known" in shown[-1]


def test_known_words_are_not_remarked_on(tab: "TryTab") -> None:
    assert not [status for status in statuses(tab, "How many objects are there?") if "vocabulary" in status]


def test_questions_that_the_page_proposes_are_understood(tab: "TryTab", tmp_path: Path) -> None:
    from clustrs.app.trial import uploaded

    Image.new("RGB", (20, 30), "red").save(tmp_path / "mine.png")
    assert tab.loaded.embedded is not None
    assert tab._question(uploaded(tmp_path / "mine.png")) == tab.loaded.embedded.question


def test_page_opens_with_measured_answers(tab: "TryTab") -> None:
    status, cards = tab._opening(tab.samples[0], "How many objects are there?")
    assert "Expected answer: 5" in status
    assert len(cards) == 2
    for card, method, tokens in zip(cards, ("none", "clustermeans"), (576, 64), strict=True):
        assert f'data-method="{method}"' in card
        assert f"{tokens} of 576" in card
        assert "KV cache" in card


def test_error_takes_the_cards_away(tab: "TryTab", monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory. Tried to allocate")

    monkeypatch.setattr("clustrs.app.trial.asking.encode", fail)
    first, last = tab.answer(tab.samples[0], "clean", 0, 0, "How many objects are there?", ["clustrs"], 16, 2)
    assert "waiting" in first[3].value
    assert "Out of memory." in last[0]
    assert all(not card.visible and not card.value for card in last[3:])


def test_draws_need_a_corruption_and_a_known_answer(tab: "TryTab") -> None:
    asked = ("How many objects are there?", ["clustrs"], 16, 2)
    (line,) = tab.draws(tab.samples[0], "clean", 0, 0, *asked)
    assert "Choose a corruption first" in line
    (line,) = tab.draws(tab.samples[0], "gaussian", 0.1, 0, "Why?", [], 16, 2)
    assert "No answer is known for this question" in line


@pytest.mark.slow
def test_samples_of_a_model_of_clips_are_clips_with_a_picture_per_frame() -> None:
    need("gradio")
    from clustrs.app.tabs import TuneTab
    from clustrs.app.trial import load_warm
    from clustrs.app.try_tab import TryTab

    clips = TryTab(load_warm("mini-onevision-clips"))
    assert all(source.clip and source.questions for source in clips.samples)
    clip = clips.samples[0]
    *_, (status, cards) = clips._answers(clip, clip.frames(), clips._question(clip), ["clustermeans"], 64, 4)
    assert f"Expected answer: {clip.questions[0][1]}" in status
    assert [card.count("data-frame=") for card in cards] == [8, 8]
    assert "64 of 400" in cards[1]
    assert clips.loaded.visual_tokens == 400
    assert 'type="range" min="1" max="8"' in clips._frames(clip)
    (line,) = clips.draws(clip, "gaussian", 0.1, 0, clips._question(clip), [], 16, 2)
    assert "not for clips" in line
    assert "Upload images" in TuneTab(clips.loaded).run(None, "", 0.97, 1, ["clustermeans"])[0]


def test_every_update_has_all_cards(tab: "TryTab") -> None:
    """A browser may drop an update for the next one."""
    updates = list(tab.answer(tab.samples[0], "clean", 0, 0, "How many objects are there?", ["clustrs"], 16, 2))
    assert len(updates) > 3
    for update in updates:
        assert [card.visible for card in update[3:5]] == [True, True]
        assert all(card.value for card in update[3:5])


def test_model_of_single_images_says_so_and_has_no_clip(tab: "TryTab") -> None:
    assert "One image per prompt" in tab.loaded.one_image
    assert not any(source.clip for source in tab.samples)
    shown = list(tab.answer(replace(tab.samples[0], name="clip-0000", drawn=True), "clean", 0, 0, "Why?", [], 16, 2))
    assert any("One image per prompt" in str(getattr(update[3], "value", "")) for update in shown)
