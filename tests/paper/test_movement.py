"""Where RRS moves tokens: the numbers, against the formulas, from labels that an attached model gives."""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import tiny_models
from paper.study_command import parts

from clustrs import ClustRS, NoPruning
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.models.ask import ask
from clustrs_paper.studies import StudyPart, movement
from clustrs_paper.studies.result import share_text

Folders = Callable[[str, str], Path]


def run(folder: Path, *words: Any) -> tuple[StudyPart, ...]:
    return parts(movement, folder, *words)


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    tiny_models.make_image(40, 40, seed=4).save(path)
    return path


class Expected:
    """Alpha, centroid and moved place of each kept token, from the paper's formulas."""

    def __init__(self, model: Any, processor: Any, image: Any, keep: int) -> None:
        every, some = (
            ask(model, processor, image, "Why?", method, 1).image for method in (NoPruning(), ClustRS(keep=keep))
        )
        self.tokens = every.selection.tokens.double().numpy()
        attention = every.scores.double().numpy()
        labels = some.selection.labels
        assert labels is not None
        self.kept = some.selection.indices.tolist()
        self.members = [[i for i in range(16) if labels[i] == labels[token]] for token in self.kept]
        self.centroids, self.alpha, self.after = [], [], []
        for token, members in zip(self.kept, self.members, strict=True):
            center = sum(attention[i] * self.tokens[i] for i in members) / sum(attention[i] for i in members)
            delta = median(float(np.linalg.norm(self.tokens[i] - center)) for i in members)
            r = float(np.linalg.norm(self.tokens[token] - center))
            alpha = 1.0 if len(members) == 1 else min(0.95, max(0.1, delta**2 / (r**2 + delta**2)))
            self.centroids.append(center)
            self.alpha.append(alpha)
            self.after.append(alpha * self.tokens[token] + (1 - alpha) * center)


@pytest.mark.parametrize("level", [None, 0.5])
def test_numbers(folder_of: Folders, load: Any, image_file: Path, level: float | None) -> None:
    words = () if level is None else ("--corrupt", "gaussian", "--levels", level, "--seed", 3)
    (result,) = run(folder_of("llava", "clip"), image_file, "--keep", 5, *words)
    image = open_image(image_file)
    if level is not None:
        image = Corruption("gaussian", level).apply(image, image_file.name, 3)
    model, processor = load()
    expected = Expected(model, processor, image, 5)
    assert [row["token"] for row in result.rows] == expected.kept
    assert [row["cluster_size"] for row in result.rows] == [len(members) for members in expected.members]
    for row, token, center, alpha, after in zip(
        result.rows, expected.kept, expected.centroids, expected.alpha, expected.after, strict=True
    ):
        before = expected.tokens[token]
        assert (row["y"], row["x"]) == divmod(token, tiny_models.GRID)
        assert row["alpha"] == pytest.approx(alpha, rel=1e-4)
        assert row["to_centroid_before"] == pytest.approx(np.linalg.norm(before - center), rel=1e-4, abs=1e-5)
        assert row["to_centroid_after"] == pytest.approx(np.linalg.norm(after - center), rel=1e-4, abs=1e-5)
        assert row["moved"] == pytest.approx(np.linalg.norm(after - before), rel=1e-4, abs=1e-5)
        assert row["corruption"] == ("clean" if level is None else "gaussian:0.5")
    assert max(row["moved"] for row in result.rows) > 0.01


def test_arrows_go_from_the_tokens_to_where_they_move(folder_of: Folders, load: Any, image_file: Path) -> None:
    (result,) = run(folder_of("llava", "clip"), image_file, "--keep", 5)
    model, processor = load()
    expected = Expected(model, processor, open_image(image_file), 5)
    largest = max(range(5), key=lambda j: len(expected.members[j]))
    assert largest != int(np.argmin(expected.alpha))
    left, right = result.figure.axes
    for axis, members, clusters in (
        (left, list(range(16)), list(range(5))),
        (right, expected.members[largest], [largest]),
    ):
        tokens = expected.tokens[members]
        centerd = tokens - tokens.mean(0)
        variances, directions = np.linalg.eigh(centerd.T @ centerd)
        (arrows,) = [part for part in axis.collections if hasattr(part, "U")]
        for i, (u, x) in enumerate(((arrows.U, arrows.X), (arrows.V, arrows.Y))):
            axis_of = directions[:, -1 - i]
            axis_of = axis_of * np.sign(axis_of[np.abs(axis_of).argmax()])
            before = np.array([expected.tokens[expected.kept[j]] for j in clusters])
            after = np.array([expected.after[j] for j in clusters])
            assert x == pytest.approx((before - tokens.mean(0)) @ axis_of, abs=1e-3)
            assert u == pytest.approx((after - before) @ axis_of, abs=1e-3)
            share = variances[-1 - i] / variances.sum()
            assert share_text(share) in (axis.get_xlabel(), axis.get_ylabel())[i]
    assert f"{len(expected.members[largest])} tokens" in right.get_title()


def test_files_and_words(folder_of: Folders, image_file: Path, tmp_path: Path) -> None:
    (result,) = run(folder_of("llava", "clip"), image_file, "--keep", 5)
    *figures, numbers = result.save(tmp_path)
    assert [path.name for path in figures] == ["movement.png", "movement.svg"]
    assert all(path.stat().st_size > 5000 for path in figures)
    with numbers.open(newline="") as file:
        assert [float(row["moved"]) for row in csv.DictReader(file)] == [row["moved"] for row in result.rows]
    alpha = [row["alpha"] for row in result.rows]
    text = f"alpha goes from {min(alpha):.2f} to {max(alpha):.2f}, median {median(alpha):.2f}."
    assert result.findings.splitlines()[0] == f"noise.png, clean: {text}"
    way = sum(row["moved"] for row in result.rows) / sum(row["to_centroid_before"] for row in result.rows)
    assert f"together they go {way:.0%} of the way" in result.findings


def test_nothing_moves_when_everything_is_kept(folder_of: Folders, image_file: Path, tmp_path: Path) -> None:
    (result,) = run(folder_of("llava", "clip"), image_file, "--keep", "1.0")
    assert [(row["cluster_size"], row["alpha"], row["moved"]) for row in result.rows] == [(1, 1.0, 0.0)] * 16
    assert "alone in their clusters: 16" in result.findings
    result.save(tmp_path)


def test_a_figure_for_each_image_and_level(folder_of: Folders, image_file: Path) -> None:
    results = run(
        folder_of("llava", "clip"), image_file, "sample:scene-1", image_file, "--corrupt", "gaussian", "--levels", "1,3"
    )
    stems = ("noise-1", "scene-1", "noise-2")
    assert [o.name for o in results] == [f"movement-{stem}-gaussian-{x}" for stem in stems for x in (1, 3)]
    assert results[0].rows == results[4].rows
    assert results[0].rows != results[1].rows
    (strongest,) = run(folder_of("llava", "clip"), image_file, "--corrupt", "salt_pepper")
    assert strongest.rows[0]["corruption"] == "salt_pepper:0.5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--levels", "1"), "corruption must be given with levels"),
        (("--corrupt", "fog"), "unknown corruption 'fog'"),
        (("--keep", "1.5"), "--keep must be a count"),
        (("--count", "-1"), "--count must be an integer from 1"),
        (("nowhere.png",), "there is no such file"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Path("nowhere"), *words)
