"""Tokens on a plane: places and choices, against an eigen-decomposition and what an attached model keeps."""

import csv
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from numpy.typing import NDArray
from paper.study_command import parts

from clustrs import ClustRS, DivPrune, FasterVLM, NoPruning, Pruner, VisionZip
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.models.ask import ask
from clustrs.models.select import ImageSelection
from clustrs.palette import MARKERS
from clustrs.pruners.registry import display_label
from clustrs_paper.studies import StudyPart, manifold

Folders = Callable[[str, str], Path]


def run(folder: Path, *words: Any) -> tuple[StudyPart, ...]:
    return parts(manifold, folder, *words)


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    tiny_models.make_image(40, 40).save(path)
    return path


@pytest.fixture(scope="module")
def result(folder_of: Folders, image_file: Path) -> StudyPart:
    words = ("--keep", 4, "--methods", "clustrs,fastervlm,divprune,visionzip", "--no-umap", "--seed", 2)
    (measured,) = run(folder_of("llava", "clip"), image_file, *words)
    return measured


def looked_at(model: Any, processor: Any, path: Path, title: str, method: Pruner) -> ImageSelection:
    image = open_image(path)
    if title != "clean":
        image = Corruption.parse(title).apply(image, path.name, 2)
    return ask(model, processor, image, "Why?", method, 1).image


def tokens_of(model: Any, processor: Any, path: Path, title: str) -> NDArray[np.float64]:
    return looked_at(model, processor, path, title, NoPruning()).selection.tokens.double().numpy()


def panel(result: StudyPart, title: str) -> list[dict[str, Any]]:
    return [dict(row) for row in result.rows if row["corruption"] == title]


def test_places_on_the_clean_images_axes(result: StudyPart, load: Any, image_file: Path) -> None:
    model, processor = load()
    clean = tokens_of(model, processor, image_file, "clean")
    centerd = clean - clean.mean(0)
    variances, directions = np.linalg.eigh(centerd.T @ centerd)
    unit = math.sqrt(variances.sum() / 16)
    for title in ("clean", "gaussian:3"):
        tokens = tokens_of(model, processor, image_file, title)
        rows = panel(result, title)
        assert [(row["token"], row["y"], row["x"]) for row in rows] == [(i, i // 4, i % 4) for i in range(16)]
        for i in (1, 2):
            direction = directions[:, -i] * np.sign(directions[np.abs(directions[:, -i]).argmax(), -i])
            expected = [float((token - clean.mean(0)) @ direction) for token in tokens]
            assert [row[f"pca_{i}"] for row in rows] == pytest.approx(expected, abs=1e-4)
        away = [float(np.linalg.norm(token - tokens.mean(0))) / unit for token in tokens]
        assert [row["distance_to_mean"] for row in rows] == pytest.approx(away, rel=1e-4)
    assert f"shows {variances[-2:].sum() / variances.sum():.0%} of the variance" in result.findings
    assert "umap_1" not in result.rows[0]


def test_kept_tokens_and_the_way_to_them(result: StudyPart, load: Any, image_file: Path) -> None:
    model, processor = load()
    clean = tokens_of(model, processor, image_file, "clean")
    unit = math.sqrt(sum(float(((token - clean.mean(0)) ** 2).sum()) for token in clean) / 16)
    for title in ("clean", "gaussian:3"):
        tokens, rows = tokens_of(model, processor, image_file, title), panel(result, title)
        for method in (ClustRS(keep=4), FasterVLM(keep=4), DivPrune(keep=4), VisionZip(keep=4)):
            indices = looked_at(model, processor, image_file, title, method).selection.indices.tolist()
            kept = [i for i in indices if i >= 0]
            assert len(kept) == (3 if method.name == "visionzip" else 4)
            assert [row[f"{method.name}_keeps"] for row in rows] == [int(i in kept) for i in range(16)]
            nearest = [min(float(np.linalg.norm(token - tokens[i])) for i in kept) / unit for token in tokens]
            assert [row[f"{method.name}_distance"] for row in rows] == pytest.approx(nearest, rel=1e-4, abs=1e-5)
            assert f"{method.name} {sum(nearest) / 16:.2f}" in result.findings.splitlines()[2 + (title != "clean")]
    assert panel(result, "clean") != panel(result, "gaussian:3")


def test_what_is_drawn(result: StudyPart) -> None:
    assert len(result.figure.axes) == 2
    for axis, title in zip(result.figure.axes, ("clean", "gaussian:3"), strict=True):
        assert axis.get_title() == f"PCA, {title}"
        rows = panel(result, title)
        gray, *marks = axis.collections
        assert len(gray.get_offsets()) == 16
        for name, mark in zip(("clustrs", "fastervlm", "divprune", "visionzip"), marks, strict=True):
            expected = [(row["pca_1"], row["pca_2"]) for row in rows if row[f"{name}_keeps"]]
            assert mark.get_offsets().tolist() == pytest.approx(np.array(expected))
            assert mark.get_label() == f"{display_label(name)} ({len(expected)})"
        assert len({str(mark.get_paths()[0].vertices.tolist()) for mark in marks}) == len(marks) <= len(MARKERS)
    first, second = result.figure.axes
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())
    x, y = ([row[f"pca_{i}"] for row in result.rows] for i in (1, 2))
    assert first.get_xlim()[0] < min(x) < max(x) < first.get_xlim()[1]
    assert first.get_ylim()[0] < min(y) < max(y) < first.get_ylim()[1]


UMAP = """
import numpy, umap
from clustrs_paper.studies.manifold import umap_coordinates

tokens = numpy.random.default_rng(0).normal(size=(5, 4))
placed = umap_coordinates(tokens, seed=2)
expected = umap.UMAP(n_neighbors=4, random_state=2, n_jobs=1).fit_transform(tokens)
assert placed.shape == (5, 2)
numpy.testing.assert_allclose(placed, expected, atol=1e-3)
"""


@pytest.mark.skipif(find_spec("umap") is None, reason="needs umap-learn")
def test_umap() -> None:
    # For five tokens, compiling takes longer than it saves. Numba reads this when it is first imported, and another
    # test of this process may have imported it already.
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", UMAP], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_umap_panels(
    monkeypatch: pytest.MonkeyPatch, folder_of: Folders, load: Any, image_file: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(manifold, "check_umap", lambda: None)
    monkeypatch.setattr(manifold, "umap_coordinates", lambda tokens, seed: seed * tokens[:, [3, 1]])
    (result,) = run(folder_of("llava", "clip"), image_file, "--keep", 4, "--seed", 2)
    model, processor = load()
    titles = ("clean", "gaussian:3")
    panels = [f"{kind}, {title}" for title in titles for kind in ("PCA", "UMAP")]
    assert [axis.get_title() for axis in result.figure.axes] == panels
    for title, axis in zip(titles, result.figure.axes[1::2], strict=True):
        expected = 2 * tokens_of(model, processor, image_file, title)[:, [3, 1]]
        rows = panel(result, title)
        assert np.array([(row["umap_1"], row["umap_2"]) for row in rows]) == pytest.approx(expected, abs=1e-4)
        gray, clustrs, *_ = axis.collections
        assert np.array(gray.get_offsets()) == pytest.approx(expected, abs=1e-4)
        kept = [bool(row["clustrs_keeps"]) for row in rows]
        assert np.array(clustrs.get_offsets()) == pytest.approx(expected[kept], abs=1e-4)
    *_, numbers = result.save(tmp_path)
    with numbers.open(newline="") as file:
        assert [float(row["umap_1"]) for row in csv.DictReader(file)] == [row["umap_1"] for row in result.rows]


def test_without_umap_installed(monkeypatch: pytest.MonkeyPatch, folder_of: Folders, image_file: Path) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(ValueError, match=r"'\.\[studies\]' './packages/clustrs-paper'.*--no-umap"):
        run(Path("nowhere"), image_file)
    assert run(folder_of("llava", "clip"), image_file, "--no-umap")[0].name == "manifold"


def test_a_figure_for_each_image_and_a_row_for_each_level(folder_of: Folders, image_file: Path) -> None:
    words = ("--no-umap", "--corrupt", "brightness", "--levels", "0.5,2", "--keep", "0.25", "--methods", "none,random")
    results = run(folder_of("llava", "clip"), "sample:scene-2", image_file, *words)
    assert [o.name for o in results] == ["manifold-scene-2", "manifold-noise"]
    assert list(dict.fromkeys(row["corruption"] for row in results[1].rows)) == [
        "clean",
        "brightness:0.5",
        "brightness:2",
    ]
    assert sum(row["random_keeps"] for row in panel(results[1], "clean")) == 4
    assert all(row["none_distance"] == 0 for row in results[1].rows)


def test_a_method_that_keeps_the_cls_token_alone(folder_of: Folders, image_file: Path) -> None:
    (result,) = run(folder_of("llava", "clip"), image_file, "--no-umap", "--methods", "visionzip", "--keep", 1)
    assert all(row["visionzip_keeps"] == 0 and math.isnan(row["visionzip_distance"]) for row in result.rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seed", "-1"), "--seed must be an integer from 0 to 4294967295"),
        (("--methods", "clustrs,"), "--methods must be values separated by spaces or commas, none of them empty"),
        (("--corrupt", "jpeg", "--levels", "0.5"), "jpeg level must be"),
        (("--count", "0"), "--count must be an integer from 1"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Path("nowhere"), "--no-umap", *words)
