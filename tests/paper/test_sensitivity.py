"""The sensitivity study: its table against loops over the record, and the paper's numbers."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper import grid_task

from clustrs.evaluation import metrics
from clustrs_paper.studies import StudyPart, sensitivity

Folders = Callable[[str, str], Path]
CHANGED: dict[tuple[str, str], dict[str, Any]] = {
    ("tau", "0.25"): {"tau": 0.25},
    ("tau", "0.5"): {"tau": 0.5},
    ("tau", "1"): {},
    ("tau", "2"): {"tau": 2.0},
    ("tau", "4"): {"tau": 4.0},
    ("clip", "no RRS"): {"shrink": False},
    ("clip", "0-1"): {"clip": [0.0, 1.0]},
    ("clip", "0.05-0.95"): {"clip": [0.05, 0.95]},
    ("clip", "0.1-0.95"): {},
    ("clip", "0.2-0.9"): {"clip": [0.2, 0.9]},
    ("clip", "0.3-0.8"): {"clip": [0.3, 0.8]},
    ("centroid", "mean"): {},
    ("centroid", "huber"): {"centroid": "huber"},
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sensitivity")


@pytest.fixture(scope="module")
def result(folder_of: Folders, data: Path, output: Path) -> StudyPart:
    with pytest.MonkeyPatch.context() as patch:
        grid_task.short_answers(patch)
        words = ("--keep", 3, "--corrupt", "clean", "gaussian:0.5")
        return grid_task.run(sensitivity, folder_of("llava", "clip"), data, output, *words)


def test_every_cell_is_that_of_the_record(result: StudyPart, output: Path) -> None:
    assert len(result.rows) == len(CHANGED) * 3
    questions = [f"{number}-{i}" for number in range(3) for i in range(3)]
    moved = set()
    for row in result.rows:
        names = ["clean", "gaussian:0.5"]
        if row["corruption"] != "mean":
            names = [row["corruption"] + ("" if row["level"] is None else f":{row['level']:g}")]
        own, default = (
            {
                question: sum(values[question] for values in measured) / len(measured)
                for measured in [[grid_task.by_question(output, 3, name, changed) for name in names]]
                for question in measured[0]
            }
            for changed in (CHANGED[row["parameter"], row["value"]], {})
        )
        assert row["questions"] == len(own) == 6
        assert row["score"] == pytest.approx(grid_task.mean(own))
        assert row["difference"] == pytest.approx(grid_task.mean(own) - grid_task.mean(default))
        first, second = (np.array([[v.get(question, np.nan) for question in questions]]) for v in (own, default))
        (expected,) = metrics.differences(first, second)
        bounds = [row[f"difference_{end}"] for end in ("low", "high", "p")]
        assert bounds == pytest.approx([expected.low, expected.high, expected.p])
        assert row["default"] == (not CHANGED[row["parameter"], row["value"]])
        assert row["default"] <= (row["difference"] == 0)
        moved |= {row["parameter"]} if row["difference"] else set()
    assert moved >= {"tau", "clip"}


def test_files_and_findings(result: StudyPart, tmp_path: Path) -> None:
    png, svg, table = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    with table.open(newline="") as file:
        assert [float(row["score"]) for row in csv.DictReader(file)] == [row["score"] for row in result.rows]
    means = {row["value"]: row for row in result.rows if row["parameter"] == "tau" and row["corruption"] == "mean"}
    assert (
        f"tau, mean of all: 0.25: {means['0.25']['score']:.3f} ({means['0.25']['difference']:+.3f} [" in result.findings
    )
    assert f"; 1: {means['1']['score']:.3f}; 2: " in result.findings
    assert "of 8 cells (about 0.4 would look clear" in result.findings


def test_numbers_of_the_paper(folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there for the paper's budgets and conditions, each parameter from its own table."""
    grid_task.short_answers(monkeypatch)
    words = ("--keep", "16,50", "--corrupt", "gaussian:2", "--parameters", "centroid", "clip", "--limit", 1)
    result = grid_task.run(sensitivity, folder_of("llava", "clip"), data, tmp_path, *words)
    measured = {(row["value"], row["keep"]): (row["paper_score"], row["paper_difference"]) for row in result.rows}
    assert measured["no RRS", 16] == (0.174, 0.014)
    assert measured["0-1", 50] == (0.171, -0.026)
    assert measured["0.1-0.95", 50] == (0.197, 0.0)
    assert measured["0.3-0.8", "all"] == (0.189, 0.0105)
    assert measured["huber", 16] == measured["mean", 50] == (None, None)
    assert f"Paper (LLaVA-1.5-7B on MM-Vet): no RRS: {0.1905:.3f}; " in result.findings
    assert [row["parameter"] for row in result.rows[:6]] == ["centroid"] * 6
    assert result.rows[0]["score_low"] is None  # one question has no interval


def test_tau_of_the_paper_is_its_own_table() -> None:
    from clustrs_paper.studies.grids import paper_scores

    assert paper_scores("sensitivity_tau")["{}", 16, "clean", None] == 0.273
    assert paper_scores("sensitivity_clip")["{}", 16, "clean", None] == 0.272
    assert paper_scores("sensitivity_tau")['{"tau": 4.0}', 144, "salt_pepper", 0.1] == 0.304


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parameters", "tau", "tauu"), "--parameters must be one of tau, clip.*did you mean 'tau'"),
        (("--parameters", "tau", "tau"), "--parameters has a duplicate value: tau"),
        (("--corrupt", "gaussian:x"), "must be NAME:LEVEL"),
    ],
)
def test_mistakes(folder_of: Folders, data: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_task.run(sensitivity, folder_of("llava", "clip"), data, tmp_path, *words)
