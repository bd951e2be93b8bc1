"""How stable ranking and selection are: the numbers, against loops over what an attached model keeps."""

import csv
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper.study_command import parts

from clustrs import ClustRS, NoPruning, Pruner, Random, VisionZip, list_methods, method_class
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.models.ask import ask
from clustrs.models.select import ImageSelection
from clustrs_paper.studies import StudyPart, stability

Folders = Callable[[str, str], Path]


def run(folder: Path, *words: Any) -> StudyPart:
    (result,) = parts(stability, folder, *words)
    return result


@pytest.fixture(scope="module")
def result(folder_of: Folders, images: list[Path]) -> StudyPart:
    """Three images at the default levels, with the default methods."""
    return run(folder_of("llava", "clip"), *images, "--keep", 4)


def cell(rows: Any, level: str, measure: str, method: str = "ranking") -> dict[str, Any]:
    (measured,) = [row for row in rows if (row["level"], row["measure"], row["method"]) == (level, measure, method)]
    return dict(measured)


def looked_at(model: Any, processor: Any, path: Path, level: float, method: Pruner) -> ImageSelection:
    """What the method keeps inside of the model, by its front door."""
    image = Corruption("gaussian", level).apply(open_image(path), path.name, 5)
    return ask(model, processor, image, "Why?", method, 1, crops="base").image


@pytest.mark.parametrize(("family", "tower"), [("llava", "clip"), ("llava_onevision", "siglip")])
def test_numbers(folder_of: Folders, load: Any, images: list[Path], family: str, tower: str) -> None:
    words = ("--methods", "clustrs,visionzip,random", "--keep", 4, "--top", 5, "--levels", "0.5,2", "--seed", 5)
    rows = run(folder_of(family, tower), *images, *words).rows
    assert len(rows) == 2 * 2 + 2 * 2 * 3
    model, processor = load(family, tower)
    for level in (0.5, 2.0):
        text = f"{level:g}"
        changes, on_top = [], []
        for path in images:
            clean, noisy = (looked_at(model, processor, path, x, NoPruning()).scores.tolist() for x in (0.0, level))
            before, after = (sorted(range(16), key=lambda i, a=a: (-a[i], i)) for a in (clean, noisy))  # type: ignore[misc]
            changes.append(sum(abs(before.index(i) - after.index(i)) for i in before[:5]) / 5)
            on_top.append(len(set(before[:5]) & set(after[:5])) / 5)
        assert cell(rows, text, "rank_change")["mean"] == pytest.approx(sum(changes) / 3)
        assert cell(rows, text, "top_overlap")["mean"] == pytest.approx(sum(on_top) / 3)
        for method in (ClustRS(keep=4), VisionZip(keep=4), Random(keep=4)):
            again, moved = [], []
            for path in images:
                tokens = looked_at(model, processor, path, 0, NoPruning()).selection.tokens.double()
                unit = math.sqrt(sum(float((v - tokens.mean(0)).square().sum()) for v in tokens) / 16)
                kept, other = (looked_at(model, processor, path, x, method).selection for x in (0.0, level))
                places = set(kept.indices.tolist()) - {-1}
                again.append(len(places & set(other.indices.tolist())) / len(places))
                nearest = [min(float((v - w).norm()) for w in other.tokens.double()) for v in kept.tokens.double()]
                moved.append(sum(nearest) / len(nearest) / unit)
            assert cell(rows, text, "kept_overlap", method.name)["mean"] == pytest.approx(sum(again) / 3)
            assert cell(rows, text, "feature_distance", method.name)["mean"] == pytest.approx(sum(moved) / 3, rel=1e-4)
    assert min(row["mean"] for row in rows if row["measure"] == "kept_overlap") < 1


def test_without_noise_nothing_moves(result: StudyPart) -> None:
    still = {"rank_change": 0, "top_overlap": 1, "kept_overlap": 1, "feature_distance": 0}
    rows = [row for row in result.rows if row["level"] == "0"]
    assert len(rows) == 2 + 2 * 7
    assert all((row["mean"], row["low"], row["high"]) == (still[row["measure"]],) * 3 for row in rows)


def test_interval_is_that_of_resampled_images(result: StudyPart, folder_of: Folders, images: list[Path]) -> None:
    alone = [run(folder_of("llava", "clip"), path, "--keep", 4, "--methods", "random").rows for path in images]
    values = [cell(rows, "1", "rank_change")["mean"] for rows in alone]
    assert cell(alone[0], "1", "rank_change")["low"] is None
    measured = cell(result.rows, "1", "rank_change")
    assert measured["mean"] == pytest.approx(sum(values) / 3)
    # One draw in 27 is three times the smallest, which is more than the 2.5 % below the interval.
    assert (measured["low"], measured["high"]) == pytest.approx((min(values), max(values)))
    assert min(values) < max(values)


def test_the_papers_numbers_are_there(result: StudyPart, folder_of: Folders, images: list[Path]) -> None:
    printed = {"0": (0, 1), "0.1": (288, 0.13), "1": (321, 0), "3": (308, 0)}
    for level in ("0", "0.1", "0.5", "1", "2", "3"):
        measured = tuple(cell(result.rows, level, what)["paper"] for what in ("rank_change", "top_overlap"))
        assert measured == printed.get(level, (None, None))
    assert all(row["paper"] is None for row in result.rows if row["method"] != "ranking")
    common = (images[0], "--methods", "random", "--levels", "0.1")
    for words in (("--top", 14), ("--corrupt", "salt_pepper")):
        assert all(row["paper"] is None for row in run(folder_of("llava", "clip"), *common, *words).rows)


def test_chance_is_the_mean_over_all_orders() -> None:
    ties = np.array([0.1, 0.7, 0.7, 0.3, 0.1])
    orders = [stability.rank_stability(ties, np.array(order), 2) for order in itertools.permutations(range(5))]
    assert stability.chance(2, 5) == pytest.approx(np.mean(orders, axis=0))
    assert stability.chance(15, 576) == pytest.approx((280.63, 0.026), abs=0.01)


def test_ties_go_to_the_first() -> None:
    assert stability.ranks(np.array([0.1, 0.7, 0.7, 0.3, 0.1])).tolist() == [3, 0, 1, 2, 4]
    assert stability.rank_stability(np.array([5.0, 4, 3, 2]), np.array([2.0, 4, 3, 9]), 2) == (1.5, 0.5)


def test_levels_of_other_corruptions(folder_of: Folders, images: list[Path]) -> None:
    rows = run(folder_of("llava", "clip"), images[0], "--corrupt", "jpeg", "--methods", "grid").rows
    assert [row["level"] for row in rows if row["measure"] == "rank_change"] == ["60", "30"]


def test_files_and_words(result: StudyPart, tmp_path: Path) -> None:
    png, svg, numbers = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in svg.read_text()
    with numbers.open(newline="") as file:
        stored = list(csv.DictReader(file))
    for row, kept in zip(stored, result.rows, strict=True):
        assert {key: "" if value is None else str(value) for key, value in kept.items()} == row
    mild = cell(result.rows, "0.1", "rank_change")["mean"]
    lines = result.findings.splitlines()
    assert 2 <= len(lines) <= 6
    assert f"move by {mild:.0f} ranks" in lines[0]
    assert "the paper's, LLaVA-1.5-7B: 288 and 13%" in lines[0]
    assert "The same positions at every level are kept by random, grid." in result.findings
    last = {
        row["method"]: row["mean"] for row in result.rows if (row["level"], row["measure"]) == ("3", "feature_distance")
    }
    assert lines[-1].endswith(
        ": " + ", ".join(f"{name} {last[name]:.2f}" for name in sorted(last, key=last.__getitem__)) + "."
    )


NAMES = {method_class(name).label: name for name in list_methods()}


def test_what_is_drawn(result: StudyPart) -> None:
    panels = result.figure.axes
    measures = ("rank_change", "top_overlap", "feature_distance", "kept_overlap")
    for panel, measure, factor in zip(panels, measures, (1, 100, 1, 100), strict=True):
        assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "0.1", "0.5", "1", "2", "3"]
        places = [0, 1, *(1 + math.log2(level / 0.1) for level in (0.5, 1, 2, 3))]
        ranking = measure in measures[:2]
        lines = [panel.containers[0].lines[0]] if ranking else panel.get_lines()
        for line in lines:
            name = "ranking" if ranking else NAMES[line.get_label()]
            means = [factor * cell(result.rows, level, measure, name)["mean"] for level in ("0.1", "3")]
            assert [line.get_ydata()[i] for i in (1, 5)] == pytest.approx(means)
            assert list(line.get_xdata()) == pytest.approx(places), "every marker is at its tick"
        assert len(lines) == (1 if ranking else 7)
    (printed,) = [line for line in panels[0].get_lines() if "paper" in str(line.get_label())]
    assert [float(y) for y in printed.get_ydata()] == [0, 288, 321, 308]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--levels", "0,x"), "--levels must be a number"),
        (("--levels", "1,1"), "--levels has a duplicate value: 1"),
        (("--levels", "-1"), "gaussian level must be"),
        (("--corrupt", "gausian"), "unknown corruption 'gausian'"),
        (("--methods", "clustrs,clustrs"), "--methods has a duplicate value: clustrs"),
        (("--methods", "clusters"), "unknown method 'clusters'"),
        (("--keep", "many"), "--keep must be a count"),
        (("--keep", "0"), "--keep must be a count"),
        (("--top", "0"), "--top must be an integer from 1"),
        (("--count", "0"), "--count must be an integer from 1"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Path("nowhere"), *words)


def test_numbers_do_not_depend_on_the_other_methods(result: StudyPart, folder_of: Folders, images: list[Path]) -> None:
    torch.manual_seed(3)
    fewer = run(folder_of("llava", "clip"), *images, "--keep", 4, "--methods", "divprune", "--levels", "3").rows
    for row in fewer:
        assert cell(result.rows, "3", row["measure"], row["method"]) == row
