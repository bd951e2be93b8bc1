"""One question, several methods: answers, costs, and what happens when a method fails or a visitor leaves."""

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from clustrs import embedded
from clustrs.app import trial
from clustrs.app.trial import (
    LoadedModel,
    Trial,
    TrialAnswer,
    load_warm,
    run_trial,
    sample_sources,
    saved_share,
    verdict,
)
from clustrs.models.ask import ask
from clustrs.models.costs import count_text, meta_model
from clustrs.pruners import get_method

QUESTION = "How many objects are there?"


def final(loaded: LoadedModel, asked: Trial) -> dict[str, TrialAnswer]:
    return {answer.method: answer for answer in run_trial(loaded, asked)}


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> dict[str, TrialAnswer]:
    return final(loaded, Trial(sample_sources("scenes")[0].open(), QUESTION, ("clustrs", "visionzip"), keep=16))


def test_unpruned_model_comes_first_and_every_method_answers(answers: dict[str, TrialAnswer]) -> None:
    assert list(answers) == ["none", "clustrs", "visionzip"]
    assert all(answer.done and answer.text and not answer.error for answer in answers.values())


def test_answers_are_those_of_ask(loaded: LoadedModel, answers: dict[str, TrialAnswer]) -> None:
    image = sample_sources("scenes")[0].open()
    for name in ("none", "clustrs"):
        method = get_method(name, **({} if name == "none" else {"keep": 16}))
        expected = ask(loaded.model, loaded.processor, image, QUESTION, method)
        answer = answers[name]
        assert answer.text == expected.text
        assert answer.image is not None
        assert answer.image.selection.indices.tolist() == expected.image.selection.indices.tolist()


def test_kv_bytes_are_those_of_the_compacted_prompt(loaded: LoadedModel, answers: dict[str, TrialAnswer]) -> None:
    whole, pruned = answers["none"], answers["clustrs"]
    assert whole.kv_bytes is not None
    assert pruned.kv_bytes is not None
    one = count_text(meta_model(loaded.model.config), 1)[2]
    assert whole.kv_bytes - pruned.kv_bytes == (576 - 16) * one
    assert saved_share(list(answers.values()), pruned) == pytest.approx(1 - pruned.kv_bytes / whole.kv_bytes)


def test_costs_are_measured(answers: dict[str, TrialAnswer]) -> None:
    for answer in answers.values():
        assert answer.prefill_seconds is not None
        assert answer.prefill_seconds > 0
        assert answer.selection_seconds is not None
        assert answer.selection_seconds > 0


def test_method_that_fails_does_not_stop_the_others(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("fastervlm needs something else. And more")

    monkeypatch.setattr("clustrs.pruners.fastervlm.FasterVLM._choose", fail)
    found = final(loaded, Trial(sample_sources("scenes")[0].open(), QUESTION, ("fastervlm", "clustrs"), keep=8))
    assert found["fastervlm"].error == "fastervlm needs something else"
    assert found["clustrs"].text
    assert not found["clustrs"].error


def test_leaving_stops_the_generation_and_frees_the_model(loaded: LoadedModel) -> None:
    stream = run_trial(
        loaded, Trial(sample_sources("scenes")[0].open(), QUESTION, ("clustrs",), keep=8, max_new_tokens=500)
    )
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert loaded.lock.acquire(blocking=False)
    loaded.lock.release()
    assert "generate" not in loaded.model.__dict__


def test_unknown_method_and_empty_question_are_refused(loaded: LoadedModel) -> None:
    image = sample_sources("scenes")[0].open()
    with pytest.raises(ValueError, match="unknown method 'clusters'"):
        next(run_trial(loaded, Trial(image, QUESTION, ("clusters",), keep=8)))
    with pytest.raises(ValueError, match="the question is empty"):
        next(run_trial(loaded, Trial(image, "  ", ("clustrs",), keep=8)))
    assert not loaded.lock.locked()


def test_unpruned_model_is_asked_once() -> None:
    image = sample_sources("scenes")[0].open()
    assert [p.name for p in Trial(image, QUESTION, ("none", "clustrs", "clustrs"), 4).pruners()] == ["none", "clustrs"]


def test_verdict_ignores_case_and_a_full_stop() -> None:
    assert verdict(" Red. ", "red") is True
    assert verdict("blue", "red") is False
    assert verdict("blue", None) is None


def test_share_is_unknown_without_the_unpruned_model() -> None:
    pruned = TrialAnswer("clustrs", kv_bytes=10)
    assert saved_share([pruned], pruned) is None
    assert saved_share([TrialAnswer("none", kv_bytes=40), pruned], pruned) == 0.75
    assert saved_share([TrialAnswer("none", kv_bytes=40)], replace(pruned, kv_bytes=None)) is None


def test_embedded_models_are_known_as_such(loaded: LoadedModel) -> None:
    assert loaded.embedded == embedded.embedded_model("mini-llava")
    assert replace(loaded, name="org/model").embedded is None
    assert signature(load_warm).parameters["name"].default == embedded.DEFAULT
    assert loaded.visual_tokens == 576
    assert trial.NO_PRUNING == "none"
