"""Denoising: distances and best alphas against the slow reference, loops, and trying out every alpha."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from paper.study_command import parts

from clustrs import ClustRS
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs_paper.studies import StudyPart, denoising
from clustrs_paper.studies.images import EncodedImage, StudyImage, VisionEncoder

Folders = Callable[[str, str], Path]
ALPHAS = [i / 2000 for i in range(2001)]


def run(folder: Path, *words: Any) -> StudyPart:
    (result,) = parts(denoising, folder, *words)
    return result


def oracle(clean: EncodedImage, noisy: EncodedImage, cls: bool) -> list[tuple[Any, Any, Any, float]]:
    """For every token that the reference keeps of the noisy image: x, y, c and alpha."""
    x, y = (encoded.tokens.double().numpy() for encoded in (clean, noisy))
    empty = np.zeros((len(y) + cls, 1))
    given = reference.Image(y, noisy.scores.double().numpy(), empty, empty, np.zeros((1, 1)), cls)
    chosen = reference.run(ClustRS(keep=5), given)
    assert chosen.centroids is not None
    assert chosen.alpha is not None
    kept = zip(chosen.indices, chosen.centroids, chosen.alpha, strict=True)
    return [(x[i], y[i], c, alpha) for i, c, alpha in kept]


def distance(x: Any, y: Any, c: Any, alpha: float) -> float:
    return float(np.linalg.norm(alpha * y + (1 - alpha) * c - x))


@pytest.mark.parametrize(("family", "tower"), [("llava", "clip"), ("llava_onevision", "siglip")])
def test_numbers(folder_of: Folders, images: list[Path], family: str, tower: str) -> None:
    folder = folder_of(family, tower)
    result = run(folder, *images, "--keep", 5, "--levels", "0.3,2", "--seed", 7)
    assert [row["level"] for row in result.rows] == [None, 0.3, 2.0]
    encoder = VisionEncoder(denoising.DenoisingConfig(model=str(folder)))
    shown = [StudyImage(path.name, open_image(path)) for path in images]
    for row in result.rows[1:]:
        noise = Corruption("gaussian", row["level"])
        means: dict[str, list[float]] = {name: [] for name in ("before", "after", "bound", "centroid")}
        kept, norms = [], []
        for image in shown:
            (clean,), (noisy,) = encoder.encode([image]), encoder.encode([image.corrupted(noise, 7)])
            tokens = oracle(clean, noisy, tower == "clip")
            kept.append(tokens)
            every = clean.tokens.double().tolist()
            norms.append(sum(math.sqrt(sum(value**2 for value in token)) for token in every) / len(every))
            measured = {
                "before": [distance(x, y, c, 1) for x, y, c, _ in tokens],
                "after": [distance(*token) for token in tokens],
                "bound": [min(distance(x, y, c, alpha) for alpha in ALPHAS) for x, y, c, _ in tokens],
                "centroid": [distance(x, y, c, 0) for x, y, c, _ in tokens],
            }
            for name, distances in measured.items():
                means[name].append(sum(distances) / 5 / norms[-1])
        for name, values in means.items():
            assert row[name] == pytest.approx(sum(values) / 3, rel=1e-4)
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
            changes = [value / before - 1 for value, before in zip(values, means["before"], strict=True)]
            if name != "before":
                assert row[f"{name}_change"] == pytest.approx(sum(changes) / 3, abs=1e-4)
        tokens = [token for some in kept for token in some]
        squares = [sum(distance(x, y, c, alpha) ** 2 for x, y, c, _ in tokens) for alpha in ALPHAS]
        best = ALPHAS[squares.index(min(squares))]
        assert row["best_constant_alpha"] == pytest.approx(best, abs=1e-3)
        constant = [
            sum(distance(x, y, c, best) for x, y, c, _ in some) / 5 / n for some, n in zip(kept, norms, strict=True)
        ]
        assert row["constant"] == pytest.approx(sum(constant) / 3, rel=1e-3)
        assert row["mean_alpha"] == pytest.approx(sum(alpha for *_, alpha in tokens) / 15, rel=1e-4)
        nearer = [distance(*token) < distance(*token[:3], 1) for token in tokens if token[3] < 1]
        assert row["share_nearer"] == pytest.approx(sum(nearer) / 15)
        assert row["share_farther"] == pytest.approx((len(nearer) - sum(nearer)) / 15)
        assert (row["images"], row["tokens"]) == (3, 15)


def test_clean_images_have_nothing_to_gain(folder_of: Folders, images: list[Path]) -> None:
    result = run(folder_of("llava", "clip"), *images[:2], "--keep", "4,0.5", "--corrupt", "jpeg")
    levels = [(row["keep"], row["corruption"], row["level"]) for row in result.rows]
    assert levels == [(keep, *of) for keep in (4, 0.5) for of in (("clean", None), ("jpeg", 60.0), ("jpeg", 30.0))]
    assert [row["tokens"] for row in result.rows] == [8, 8, 8, 16, 16, 16]
    for row in (result.rows[0], result.rows[3]):
        assert (row["before"], row["bound"], row["constant"], row["best_constant_alpha"]) == (0, 0, 0, 1)
        assert row["after"] > 0
        assert row["after_change"] is None
    assert f"On clean images RRS moves tokens by {result.rows[0]['after']:.1%}" in result.findings


def test_files(folder_of: Folders, images: list[Path], tmp_path: Path) -> None:
    result = run(folder_of("llava", "clip"), images[0], "--keep", 4, "--levels", 1)
    assert "by one image, at 1 (" in result.findings
    png, svg, table = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    with table.open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert [float(row["after"]) for row in stored] == [row["after"] for row in result.rows]
    assert stored[1]["after_low"] == ""


def test_best_alpha() -> None:
    """Inside [0, 1]: beyond the center, beyond the token, and where both are one."""
    dd, de = np.array([4.0, 4.0, 4.0, 0.0]), np.array([1.0, -1.0, 9.0, 0.0])
    assert denoising.best_alpha(dd, de).tolist() == [0.25, 0.0, 1.0, 1.0]


def test_findings_says_where_it_does_not_help() -> None:
    def row(level: float | None, change: float, low: float, high: float) -> dict[str, Any]:
        changes = {f"{name}_change": change for name in ("constant", "bound")}
        own = {"after_change": change, "after_change_low": low, "after_change_high": high, "after": 0.02}
        alphas = {"mean_alpha": 0.5, "best_constant_alpha": 0.25}
        return {"keep": 16, "corruption": "gaussian", "level": level, "images": 9, **changes, **own, **alphas}

    rows = [row(None, 0, 0, 0), row(0.1, 0.05, 0.01, 0.09), row(1, -0.03, -0.05, -0.01), row(2, -0.01, -0.03, 0.01)]
    text = denoising.findings(rows)
    assert "farther at 0.1 (+5.0%); nearer at 1 (-3.0%); neither nearer nor farther at 2 (-1.0%)." in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "0"), "--keep must be a count"),
        (("--keep", "4,,5"), "--keep must be values separated by spaces or commas, none of them empty"),
        (("--levels", "1,1"), "--levels has a duplicate value: 1"),
        (("--corrupt", "gausian"), "did you mean 'gaussian'"),
        (("--count", "0"), "--count must be an integer from 1"),
        (("nothing.png",), "there is no such file"),
    ],
)
def test_mistakes(folder_of: Folders, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(folder_of("llava", "clip"), *words)
