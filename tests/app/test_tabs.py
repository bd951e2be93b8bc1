"""The first tab without a browser: what it says beside the answers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from app_tools import need
from PIL import Image

if TYPE_CHECKING:
    from clustrs.app.tabs import TryTab
    from clustrs.app.trial import LoadedModel


@pytest.fixture(scope="module")
def tab(loaded: "LoadedModel") -> "TryTab":
    need("gradio")
    from clustrs.app.tabs import TryTab

    return TryTab(loaded)


def statuses(tab: "TryTab", question: str) -> list[Any]:
    return [update[0] for update in tab.answer(tab.samples[0], "clean", 0, 0, question, ["random"], 4, 2)]


def test_unknown_words_are_named_as_long_as_the_answers_are_there(tab: "TryTab") -> None:
    shown = statuses(tab, "Is there an espresso?")
    assert len(shown) > 2
    for status in shown:
        assert "not in the model&#39;s vocabulary: &#39;espresso&#39;: read as unknown" in status
        assert 'role="alert"' in status
    assert "no answer is known" in shown[-1]


def test_known_words_are_not_remarked_on(tab: "TryTab") -> None:
    assert not [status for status in statuses(tab, "How many objects are there?") if "vocabulary" in status]


def test_questions_that_the_page_proposes_are_understood(tab: "TryTab", tmp_path: Path) -> None:
    from clustrs.app.trial import uploaded

    Image.new("RGB", (20, 30), "red").save(tmp_path / "mine.png")
    _, question = tab._questions(uploaded(tmp_path / "mine.png"))
    assert tab.loaded.embedded is not None
    assert question == tab.loaded.embedded.question
