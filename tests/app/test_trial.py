"""Images of a trial, and answers of several methods: costs, failures, and a visitor who leaves."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clustrs import embedded
from clustrs.app import markup, trial
from clustrs.app.trial import (
    LoadedModel,
    Source,
    TrialAnswer,
    corrupted,
    count_right,
    level_range,
    load_warm,
    nearest_level,
    run_trial,
    sample_sources,
    trial_methods,
    uploaded,
)
from clustrs.corruptions import Corruption, corruption_rule, list_corruptions
from clustrs.embedded import samples
from clustrs.evaluation.report.document import data_uri
from clustrs.models.ask import ask
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import count_text, meta_model
from clustrs.pruners import ClustRS, get_method


def test_samples_have_questions_with_answers(loaded: LoadedModel) -> None:
    first = sample_sources(loaded)[0]
    assert first.expected("How many objects are there?") == "5"
    assert first.expected(" How many objects are there? ") == "5"
    assert first.expected("Why?") is None


def test_samples_are_those_of_the_models_task(loaded: LoadedModel) -> None:
    for model, task in {"mini-llava": "scenes", "photo-llava": "photos", "smol-llava": "photos"}.items():
        found = sample_sources(replace(loaded, name=model))
        assert [source.path for source in found] == [sample.path for sample in samples(task)]
        assert all(source.questions for source in found)
    assert len(sample_sources(replace(loaded, name="org/model"))) == len(samples())


def test_upload_that_is_no_image_is_refused_by_its_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("no image")
    with pytest.raises(ValueError, match=r"^image 'notes\.png': not an image in any format") as caught:
        uploaded(path)
    assert str(tmp_path) not in str(caught.value)


def test_upload_of_an_enormous_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "enormous.png"
    Image.new("1", (9000, 9000)).save(path)
    with pytest.raises(ValueError, match=r"image 'enormous\.png': too large, 9000 x 9000"):
        uploaded(path)


def test_upload_has_no_known_answers(tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    Image.new("RGB", (20, 30), "red").save(path)
    source = uploaded(path)
    assert (source.name, source.questions, source.open().size) == ("mine.png", (), (20, 30))


@pytest.mark.parametrize("model", ["", *embedded.BEARS])
@pytest.mark.parametrize("name", list_corruptions())
def test_every_level_of_a_slider_is_accepted(name: str, model: str) -> None:
    span, rule = level_range(name, model), corruption_rule(name)
    low, high, step, value = (span[key] for key in ("minimum", "maximum", "step", "value"))
    for level in (low, value, high, *(low + i * step for i in range(round((high - low) / step) + 1))):
        assert rule.accepts(nearest_level(name, level))
    assert low <= value <= high
    assert nearest_level(name, value) == value


def test_slider_levels_are_rounded_and_bounded() -> None:
    assert nearest_level("gaussian", 0.30000000000000004) == 0.3
    assert nearest_level("gaussian", 999) == 100
    assert nearest_level("motion_blur", 14) in (13, 15)
    assert nearest_level("jpeg", 0) == 1


@pytest.mark.parametrize("model", embedded.BEARS)
def test_sliders_end_where_the_unpruned_model_has_lost_half_of_its_score(model: str) -> None:
    """As the stored curves of the unpruned model have it."""
    stored = Path(__file__).parents[2] / "docs" / "results" / "evidence" / f"{model}-levels.csv"
    with stored.open() as opened:
        chosen = [row for row in csv.DictReader(opened) if row["chosen"] == "True"]
    for name in {row["corruption"] for row in chosen}:
        levels = {float(row["loss"]): float(row["level"]) for row in chosen if row["corruption"] == name}
        assert embedded.BEARS[model][name] == (levels[0.1], levels[0.5])
        assert level_range(name, model)["maximum"] == levels[0.5]


def test_corrupted_image_is_that_of_the_command_line(loaded: LoadedModel) -> None:
    source = sample_sources(loaded)[0]
    expected = Corruption("gaussian", 0.5).apply(source.open(), "scene-1.png", 3)
    assert np.array_equal(np.asarray(corrupted(source, "gaussian", 0.5, 3)[0]), np.asarray(expected))
    assert np.array_equal(np.asarray(corrupted(source, "clean", 0.5, 3)[0]), np.asarray(source.open()))


def test_large_images_are_shown_small() -> None:
    small, large = data_uri(Image.new("RGB", (100, 50))), data_uri(Image.effect_noise((4000, 2000), 90))
    assert small.startswith("data:image/webp;base64,")
    assert len(large) < 400_000


def test_source_reads_the_file_each_time(tmp_path: Path) -> None:
    path = tmp_path / "gone.png"
    Image.new("RGB", (8, 8)).save(path)
    source = Source(path, "gone.png")
    path.unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        source.open()


QUESTION = "How many objects are there?"


def trial_of(loaded: LoadedModel, names: tuple[str, ...], keep: int, max_new_tokens: int = 32) -> Iterator[TrialAnswer]:
    image = sample_sources(loaded)[0].open()
    return run_trial(loaded, [image], QUESTION, trial_methods(loaded, names, keep), max_new_tokens)


def final(loaded: LoadedModel, names: tuple[str, ...], keep: int) -> dict[str, TrialAnswer]:
    return {answer.method: answer for answer in trial_of(loaded, names, keep)}


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> dict[str, TrialAnswer]:
    return final(loaded, ("clustrs", "visionzip"), keep=16)


def test_unpruned_model_comes_first_and_every_method_answers(answers: dict[str, TrialAnswer]) -> None:
    assert list(answers) == ["none", "clustrs", "visionzip"]
    assert all(answer.done and answer.text and not answer.error for answer in answers.values())


def test_tokens_of_a_method_inside_the_language_model_are_a_mean_over_layers(loaded: LoadedModel) -> None:
    answer = final(loaded, ("fastv",), keep=16)["fastv"]
    assert answer.images[0].kept == 16
    assert 16 < answer.tokens < answer.placeholders


def test_answers_are_those_of_ask(loaded: LoadedModel, answers: dict[str, TrialAnswer]) -> None:
    image = sample_sources(loaded)[0].open()
    for name in ("none", "clustrs"):
        method = get_method(name, **({} if name == "none" else {"keep": 16}))
        expected = ask(loaded.model, loaded.processor, image, QUESTION, method)
        answer = answers[name]
        assert answer.text == expected.text
        assert answer.images[0].selection.indices.tolist() == expected.image.selection.indices.tolist()


def test_kv_bytes_are_those_of_the_compacted_prompt(loaded: LoadedModel, answers: dict[str, TrialAnswer]) -> None:
    whole, pruned = answers["none"], answers["clustrs"]
    assert whole.kv_bytes is not None
    assert pruned.kv_bytes is not None
    one = count_text(meta_model(loaded.model.config), 1)[2]
    assert whole.kv_bytes - pruned.kv_bytes == (576 - 16) * one
    card = markup.answer_card(pruned, others=list(answers.values()))
    assert f"\u2212{100 * (1 - pruned.kv_bytes / whole.kv_bytes):.0f} %" in card
    assert "16 of 576 <strong>\u221297 %</strong>" in card


def test_costs_are_measured(answers: dict[str, TrialAnswer]) -> None:
    for answer in answers.values():
        assert answer.prefill_seconds is not None
        assert answer.prefill_seconds > 0
        assert answer.selection_seconds is not None
        assert answer.selection_seconds > 0
        assert answer.encode_seconds is not None
        selection = 0 if answer.method == "none" else answer.selection_seconds
        assert answer.seconds == pytest.approx(answer.encode_seconds + selection + answer.prefill_seconds)


def test_method_that_fails_does_not_stop_the_others(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("fastervlm needs something else. And more")

    monkeypatch.setattr("clustrs.pruners.fastervlm.FasterVLM._choose", fail)
    found = final(loaded, ("fastervlm", "clustrs"), keep=8)
    assert found["fastervlm"].error == "fastervlm needs something else"
    assert found["clustrs"].text
    assert not found["clustrs"].error


def test_leaving_stops_the_generation_and_frees_the_model(loaded: LoadedModel) -> None:
    stream = trial_of(loaded, ("clustrs",), keep=8, max_new_tokens=500)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert loaded.lock.acquire(blocking=False)
    loaded.lock.release()
    assert "generate" not in loaded.model.__dict__


def test_unknown_method_and_empty_question_are_refused(loaded: LoadedModel) -> None:
    image = sample_sources(loaded)[0].open()
    with pytest.raises(ValueError, match="unknown method 'clusters'"):
        trial_methods(loaded, ("clusters",), keep=8)
    with pytest.raises(ValueError, match="question must not be empty"):
        next(run_trial(loaded, [image], "  ", trial_methods(loaded, ("clustrs",), keep=8)))
    assert not loaded.lock.locked()


def test_configured_method_has_its_parameters_and_options(loaded: LoadedModel) -> None:
    configured = replace(loaded, pruning=PruningConfig(method=ClustRS(keep=9, tau=2), attention="plain"))
    method, other = trial_methods(configured, ("clustrs", "divprune"), keep=8)[1:]
    assert (method, other) == (ClustRS(keep=8, tau=2), get_method("divprune", keep=8))
    seen = []
    original = ClustRS.attach

    def attach(self: ClustRS, model: object, **options: object) -> object:
        seen.append(options.get("attention"))
        return original(self, model, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClustRS, "attach", attach)
        image = sample_sources(loaded)[0].open()
        answers = list(run_trial(configured, [image], QUESTION, [method], 2))
    assert seen == ["plain"]
    assert answers[-1].images[0].kept == 8


def test_unpruned_model_is_asked_once(loaded: LoadedModel) -> None:
    assert [p.name for p in trial_methods(loaded, ("none", "clustrs", "clustrs"), 4)] == ["none", "clustrs"]


@pytest.mark.parametrize(
    ("text", "expected", "shown"), [(" Red. ", "red", "right"), ("blue", "red", "wrong"), ("blue", None, "")]
)
def test_verdict_ignores_case_and_a_full_stop(text: str, expected: str | None, shown: str) -> None:
    card = markup.answer_card(TrialAnswer("clustrs", text=text, done=True), expected=expected)
    assert [word for word in ("right", "wrong") if word in card] == ([shown] if shown else [])


def test_share_is_unknown_without_the_unpruned_model(answers: dict[str, TrialAnswer]) -> None:
    pruned, whole = replace(answers["clustrs"], kv_bytes=10), TrialAnswer("none", kv_bytes=40)
    shares = {name: share for name, _, share, _ in markup.meter(pruned, whole)}
    assert shares == {"Tokens": 16 / 576, "First token": None, "KV cache": 0.25}
    assert [share for _, _, share, _ in markup.meter(pruned, None)] == [16 / 576, None, None]
    assert markup.meter(TrialAnswer("none"), None) == []


def test_right_answers_are_counted_over_draws_of_the_noise(loaded: LoadedModel) -> None:
    """As asking one by one counts them."""
    source, noise = sample_sources(loaded)[0], Corruption("gaussian", 0.4)
    methods = trial_methods(loaded, ("clustermeans",), 64)
    *_, (seen, right) = count_right(loaded, source, noise, QUESTION, methods, 4)
    expected = dict.fromkeys(("none", "clustermeans"), 0)
    for seed in range(20):
        image = noise.apply(source.open(), "scene-1.png", seed)
        for method in methods:
            text = ask(loaded.model, loaded.processor, image, QUESTION, method, 4).text
            expected[method.name] += text == "5"
    assert (seen, right) == (20, expected)
    assert 0 < right["none"] < 20
    with pytest.raises(ValueError, match="no answer is known for this question"):
        next(count_right(loaded, source, noise, "Why?", methods, 4))


def test_embedded_models_are_known_as_such(loaded: LoadedModel) -> None:
    assert loaded.embedded == embedded.embedded_model("mini-llava")
    assert replace(loaded, name="org/model").embedded is None
    assert signature(load_warm).parameters["name"].default == embedded.DEFAULT
    assert loaded.visual_tokens == 576
    assert trial.NO_PRUNING == "none"
