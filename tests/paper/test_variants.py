"""Variants of ClustRS: the split by image, what is picked, and the table against loops over the record."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from paper import grid_task

from clustrs import from_dict
from clustrs.evaluation import metrics
from clustrs_paper.studies import StudyPart, variants

Folders = Callable[[str, str], Path]
WORDS = ("--keep", 4, 9, "--corrupt", "clean", "gaussian:1", "--batch-size", 8)
IMAGES, EACH = 5, 4


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images with four questions each, every other one about a place."""
    root = tmp_path_factory.mktemp("task") / "questions"
    root.mkdir()
    rows = []
    for number in range(IMAGES):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        for i in range(EACH):
            row = {"id": f"{number}-{i}", "image": f"{number}.png", "question": f"Why {i}?", "answer": "x"}
            rows.append({**row, "kinds": ["place" if i % 2 else "other"]})
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def result(folder_of: Folders, questions: Path, output: Path) -> StudyPart:
    with pytest.MonkeyPatch.context() as patch:
        grid_task.short_answers(patch)
        return grid_task.run(variants, folder_of("llava", "clip"), questions, output, *WORDS)


def scores(output: Path, name: str, keep: int, corruption: str) -> dict[str, float]:
    """The score of each question with a method, from the record."""
    changed = {**variants.VARIANTS, **variants.CONTROLS}[name]
    method = json.loads(json.dumps(from_dict({"name": "clustrs", **changed, "keep": keep}).to_dict()))
    return {
        row["item"]: row["score"]
        for row in grid_task.answers(output)
        if row["method"] == method and row["corruption"] == corruption
    }


def rows_where(result: StudyPart, **columns: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in result.rows if all(row[key] == value for key, value in columns.items())]


def test_every_method_is_in_every_cell(result: StudyPart) -> None:
    cells = [(4, "clean"), (4, "gaussian"), (4, "mean"), (9, "clean"), (9, "gaussian"), (9, "mean"), ("all", "mean")]
    for half in ("pick", "report"):
        for name in (*variants.VARIANTS, *variants.CONTROLS):
            own = rows_where(result, half=half, kind="all", variant=name)
            assert [(row["keep"], row["corruption"]) for row in own] == cells
            assert {row["control"] for row in own} == {name in variants.CONTROLS}
    counts = {
        half: {row["questions"] for row in rows_where(result, half=half, kind="all")} for half in ("pick", "report")
    }
    assert counts == {"pick": {2 * EACH}, "report": {3 * EACH}}
    assert {row["questions"] for row in rows_where(result, kind="place")} == {3 * EACH // 2}


def test_scores_and_differences_are_those_of_the_record(result: StudyPart, output: Path) -> None:
    items = sorted(scores(output, "ClustRS", 4, "clean"))
    halves = variants.split([f"{item[0]}.png" for item in items], 0)
    moved = False
    for half, mask in halves.items():
        subset = [item for item, inside in zip(items, mask, strict=True) if inside]
        for name in ("ClustRS", "medoid", "sqrt", "DivPrune", "DivPrune, merged"):
            own, reference = (scores(output, one, 9, "gaussian:1") for one in (name, "ClustRS"))
            (row,) = rows_where(result, half=half, kind="all", variant=name, keep=9, corruption="gaussian")
            assert row["score"] == pytest.approx(sum(own[item] for item in subset) / len(subset))
            first, second = (np.array([[one[item] for item in subset]]) for one in (own, reference))
            (expected,) = metrics.differences(first, second)
            assert row["difference"] == pytest.approx(expected.mean)
            bounds = [row[f"difference_{end}"] for end in ("low", "high", "p")]
            assert bounds == pytest.approx([expected.low, expected.high, expected.p])
            moved = moved or bool(row["difference"])
    assert moved


def test_kinds_are_those_of_the_held_out_half(result: StudyPart, output: Path) -> None:
    items = sorted(scores(output, "ClustRS", 4, "clean"))
    mask = variants.split([f"{item[0]}.png" for item in items], 0)["report"]
    subset = [item for item, inside in zip(items, mask, strict=True) if inside and int(item[-1]) % 2]
    values = [
        scores(output, "medoid", 4, corruption)[item] for corruption in ("clean", "gaussian:1") for item in subset
    ]
    (row,) = rows_where(result, kind="place", variant="medoid", keep=4)
    assert row["half"] == "report"
    assert row["score"] == pytest.approx(sum(values) / len(values))


def test_the_best_variant_of_the_other_half_is_picked(result: StudyPart) -> None:
    for keep in (4, 9, "all"):
        means = rows_where(result, half="pick", kind="all", keep=keep, corruption="mean")
        others = [row for row in means if not row["control"] and row["variant"] != "ClustRS"]
        best = max(others, key=lambda row: row["difference"])
        picked = {row["variant"] for row in rows_where(result, keep=keep, picked=True)}
        assert picked == {best["variant"]}
        (row,) = rows_where(result, half="report", kind="all", keep=keep, corruption="mean", picked=True)
        assert f"Picked: {row['variant']}, {row['difference']:+.3f}" in result.findings


def test_no_control_is_picked() -> None:
    def row(variant: str, difference: float, half: str = "pick") -> dict[str, Any]:
        cell = {"half": half, "kind": "all", "keep": 4, "corruption": "mean", "difference": difference}
        return {**cell, "variant": variant, "control": variant in variants.CONTROLS}

    rows = [row("ClustRS", 0.0), row("DivPrune", 0.9), row("medoid", -0.2), row("sqrt", -0.1), row("centroid", -0.1)]
    assert variants.picks([*rows, row("medoid", 0.8, "report")]) == {4: "sqrt"}


def test_the_split_is_by_image_and_seed() -> None:
    images = [f"{i // 3}.png" for i in range(30)]
    halves = variants.split(images, 7)
    assert (halves["pick"] != halves["report"]).all()
    of_image = {image: {bool(halves["pick"][i]) for i in range(30) if images[i] == image} for image in images}
    assert all(len(sides) == 1 for sides in of_image.values())
    assert halves["pick"].sum() == 15
    assert (variants.split(images[::-1], 7)["pick"] == halves["pick"][::-1]).all()
    assert any((variants.split(images, seed)["pick"] != halves["pick"]).any() for seed in range(3))
    with pytest.raises(ValueError, match="must be about two images or more, got 1"):
        variants.split(["a.png"] * 4, 0)


def test_findings_and_files(result: StudyPart, tmp_path: Path) -> None:
    methods = len(variants.VARIANTS) + len(variants.CONTROLS)
    assert f"{IMAGES * EACH} questions" in result.findings
    assert result.findings.count(" cells (about ") == methods - 1
    png, svg, table = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert len(table.read_text().splitlines()) == 1 + len(result.rows)


def test_another_split_answers_nothing_again(
    result: StudyPart, folder_of: Folders, questions: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid_task.short_answers(monkeypatch)
    monkeypatch.setattr("clustrs.models.load.load_model", lambda *_: pytest.fail("nothing is left to do"))
    again = grid_task.run(variants, folder_of("llava", "clip"), questions, output, *WORDS)
    assert again.rows == result.rows
    other = grid_task.run(variants, folder_of("llava", "clip"), questions, output, *WORDS, "--split-seed", 1)
    assert other.rows != result.rows


def test_one_budget_and_one_condition(folder_of: Folders, data: Path, tmp_path: Path) -> None:
    """No means, one kind of questions, and an image that can't be read: the cells themselves are compared."""
    part = grid_task.run(
        variants, folder_of("llava", "clip"), data, tmp_path, "--keep", 4, "--corrupt", "clean", "--split-seed", 1
    )
    methods = len(variants.VARIANTS) + len(variants.CONTROLS)
    assert len(part.rows) == 2 * methods
    assert sum(row["picked"] for row in part.rows) == 2
    assert "answers are left out: failed" in part.findings
