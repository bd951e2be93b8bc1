"""Clusters, scores, distances and the plane that the Inspect tab shows, against the selection itself."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from clustrs.app import markup
from clustrs.app.inspection import Inspection, attention, inspect
from clustrs.app.trial import LoadedModel, corrupted, run_trial, sample_sources
from clustrs.models import ask as shared_encoding
from clustrs.models.ask import chat_prompt
from clustrs.pruners import get_method


@pytest.fixture(scope="module")
def images(loaded: LoadedModel) -> list[tuple[str, Image.Image]]:
    source = sample_sources(loaded)[0]
    return [("clean", source.open()), ("noisy", corrupted(source, "gaussian", 0.5, 0)[0])]


@pytest.fixture(scope="module")
def inspected(loaded: LoadedModel, images: list[tuple[str, Image.Image]]) -> Inspection:
    return inspect(loaded, get_method("clustrs", keep=12), images)


def test_every_token_is_there_and_k_are_kept(inspected: Inspection) -> None:
    for view in inspected.views:
        columns = view.columns
        assert {len(values) for values in columns.values()} == {576}
        assert view.grid == (24, 24)
        assert sum(columns["kept"]) == 12
        assert set(zip(columns["y"], columns["x"], strict=True)) == {(y, x) for y in range(24) for x in range(24)}


def test_every_cluster_has_one_kept_token_and_only_that_has_an_alpha(inspected: Inspection) -> None:
    for view in inspected.views:
        clusters: dict[int | None, list[bool]] = {}
        for cluster, kept, alpha in zip(*(view.columns[name] for name in ("cluster", "kept", "alpha")), strict=True):
            clusters.setdefault(cluster, []).append(kept)
            assert (alpha is not None) == kept
        assert None not in clusters
        assert len(clusters) == 12
        assert all(sum(kept) == 1 for kept in clusters.values())


def test_distances_and_scores_are_those_of_the_selection(
    loaded: LoadedModel, images: list[tuple[str, Image.Image]], inspected: Inspection
) -> None:
    prompt = chat_prompt(loaded.processor, "What?")
    encoded = shared_encoding.encode(loaded.model, loaded.processor, [images[0][1]], [(0, prompt)]).images[0]
    selection = get_method("clustrs", keep=12).select(encoded.tokens, encoded.scores, layout=encoded.layout)
    assert selection.labels is not None
    assert selection.centroids is not None
    for index in range(0, 576, 37):
        token = {name: values[index] for name, values in inspected.views[0].columns.items()}
        expected = (encoded.tokens[index] - selection.centroids[selection.labels[index]]).norm()
        assert token["cluster"] == selection.labels[index]
        assert token["distance"] == pytest.approx(float(expected), rel=1e-4)
        assert token["score"] == pytest.approx(float(encoded.scores[index]))


def test_plane_is_that_of_the_clean_image(inspected: Inspection) -> None:
    clean, noisy = (np.array([view.columns["px"], view.columns["py"]]).T for view in inspected.views)
    assert np.allclose(clean.mean(0), 0, atol=1e-6)
    assert clean[:, 0].var() >= clean[:, 1].var()
    assert abs(np.corrcoef(clean.T)[0, 1]) < 1e-6
    assert not np.allclose(noisy.mean(0), 0, atol=0.1)


def test_sizes_count_the_members_of_clusters(inspected: Inspection) -> None:
    for view in inspected.views:
        cluster, size, kept = (view.columns[name] for name in ("cluster", "size", "kept"))
        assert [size[i] for i in range(576) if kept[i]] == [cluster.count(cluster[i]) for i in range(576) if kept[i]]
        assert sum(one for one in size if one is not None) == 576


@pytest.mark.parametrize("name", ["none", "clustrs", "divprune"])
def test_attention_before_and_after_is_that_of_an_eager_forward(loaded: LoadedModel, name: str) -> None:
    image, question = sample_sources(loaded)[0].open(), "How many objects are there?"
    method = get_method(name, **({} if name == "none" else {"keep": 12}))
    batch = loaded.encode([image], question, [method])
    usual = loaded.model.get_decoder().config._attn_implementation
    found = attention(loaded, batch, method)
    assert found is not None
    assert loaded.model.get_decoder().config._attn_implementation == usual
    loaded.model.set_attn_implementation("eager")
    try:
        for shares, one in zip(found, (get_method("none"), method), strict=True):
            with one(loaded.model, processor=loaded.processor) as handle, torch.inference_mode():
                output = handle.forward(batch.images, **batch.inputs, output_attentions=True)
            rows = torch.stack([layer[0, :, -1] for layer in output.attentions]).mean((0, 1))
            start = batch.input_ids[0].tolist().index(loaded.model.config.image_token_id)
            expected = rows[start : start + handle.last[0].kept]
            assert len(shares) == (576 if one.name == "none" else 12)
            assert shares == pytest.approx(expected.numpy(), abs=1e-6)
    finally:
        loaded.model.set_attn_implementation(usual)


def test_attention_after_pruning_is_divided_among_the_members(inspected: Inspection, loaded: LoadedModel) -> None:
    view = inspected.views[0]
    assert 0 < sum(view.columns["after"]) < 1
    assert 0 < sum(view.columns["before"]) < 1
    by_cluster: dict[int, set[float]] = {}
    for cluster, share in zip(view.columns["cluster"], view.columns["after"], strict=True):
        by_cluster.setdefault(cluster, set()).add(share)
    assert all(len(shares) == 1 for shares in by_cluster.values())
    page = markup.inspection(inspected)
    assert page.count("attention of the language model before pruning") == 2
    assert page.count("<circle") == 2 * (576 + 12)


def test_method_without_clusters_says_so(loaded: LoadedModel, images: list[tuple[str, Image.Image]]) -> None:
    found = inspect(loaded, get_method("divprune", keep=8), images[:1])
    assert not found.clusters
    assert all(found.views[0].columns[name] == [None] * 576 for name in ("cluster", "alpha", "distance"))
    assert "DivPrune forms no clusters" in markup.inspection(found)


def test_note_says_what_the_image_cannot_show(loaded: LoadedModel, images: list[tuple[str, Image.Image]]) -> None:
    view = inspect(loaded, get_method("visionzip", keep=16), images[:1]).views[0]
    assert "CLS token" in view.note
    assert "mixtures" in view.note


class Marks(HTMLParser):
    """Collects the tokens that the page draws and the data beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.rects: list[dict[str, str | None]] = []
        self.circles: list[dict[str, str | None]] = []
        self.columns: list[dict[str, list[float]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "data-tokens" in found:
            self.columns.append(json.loads(found["data-tokens"] or ""))
        if "data-i" in found:
            (self.rects if tag == "rect" else self.circles).append(found)


def test_page_draws_every_token_twice_and_lets_the_keyboard_in_once(inspected: Inspection) -> None:
    marks = Marks()
    marks.feed(markup.inspection(inspected))
    assert len(marks.rects) == len(marks.circles) == 2 * 576
    assert [len(columns["score"]) for columns in marks.columns] == [576, 576]
    assert sum(rect.get("tabindex") == "0" for rect in marks.rects) == 2
    assert sum(rect.get("tabindex") == "-1" for rect in marks.rects) == 2 * 11
    for circle in marks.circles:
        assert 0 <= float(circle["cx"] or -1) <= 400
        assert 0 <= float(circle["cy"] or -1) <= 400


def test_attention_map_is_brightest_where_the_score_is_highest(inspected: Inspection) -> None:
    view = inspected.views[0]
    heat, brightest = markup.attention_map(view, "score")
    scores = np.array(view.columns["score"])
    assert brightest == pytest.approx(np.quantile(scores, 0.99))
    side = heat.width / 24
    tones = [
        sum(heat.getpixel((int((view.columns["x"][i] + 0.5) * side), int((view.columns["y"][i] + 0.5) * side))))  # type: ignore[arg-type]
        for i in (int(scores.argmax()), int(scores.argmin()))
    ]
    assert tones[0] > tones[1] + 200


def test_a_method_that_reads_the_question(loaded: LoadedModel, images: list[tuple[str, Image.Image]]) -> None:
    """The visitor's, or the model's own; the note says which."""
    method, kept = get_method("cdpruner", keep=12), []
    for asked, question in (("", loaded.question), ("Is this a camera?", "Is this a camera?")):
        (view,) = inspect(loaded, method, images[:1], asked).views
        assert f"selected for the question {question!r}" in view.note
        kept.append([i for i, one in enumerate(view.columns["kept"]) if one])
        *_, answer = run_trial(loaded, [images[0][1]], question, [method], 2)
        assert not answer.error
        assert kept[-1] == answer.images[0].selection.indices.tolist()
    assert kept[0] != kept[1]
