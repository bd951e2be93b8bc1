"""The ablation: its table against loops over the record, the paper's numbers, and tasks with a judge."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper import grid_task

from clustrs.evaluation import metrics
from clustrs_paper.studies import StudyPart, ablation

Folders = Callable[[str, str], Path]
COLUMNS: dict[str, dict[str, Any]] = {
    "clustering": {"distance": "euclidean", "shrink": False},
    "c_h": {"shrink": False},
    "clustrs": {},
}
GAINS = {"gain_huber": ("c_h", "clustering"), "gain_rrs": ("clustrs", "c_h")}
WORDS = ("--keep", 4, 16, "--levels", "0.5", "2", "--seeds", 0, 1, "--batch-size", 4)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ablation")


@pytest.fixture(scope="module")
def result(folder_of: Folders, data: Path, output: Path) -> StudyPart:
    with pytest.MonkeyPatch.context() as patch:
        grid_task.short_answers(patch)
        return grid_task.run(ablation, folder_of("llava", "clip"), data, output, *WORDS)


def row_of(result: StudyPart, keep: int | str, level: float | None) -> dict[str, Any]:
    (measured,) = [row for row in result.rows if (row["keep"], row["level"]) == (keep, level)]
    return dict(measured)


def test_layout(result: StudyPart) -> None:
    rows = [(row["keep"], row["corruption"], row["level"]) for row in result.rows]
    levels = [("gaussian", 0.5), ("gaussian", 2.0), ("mean", None)]
    assert rows == [(keep, *level) for keep in (4, 16) for level in levels] + [("all", "mean", None)]
    assert {row["questions"] for row in result.rows} == {grid_task.QUESTIONS - grid_task.FAILING}


def test_scores_and_gains_are_those_of_the_record(result: StudyPart, output: Path) -> None:
    for keep in (4, 16):
        for level in (0.5, 2.0):
            row = row_of(result, keep, level)
            measured = {
                name: grid_task.by_question(output, keep, f"gaussian:{level:g}", changed)
                for name, changed in COLUMNS.items()
            }
            assert all(len(values) == 6 for values in measured.values())
            for name, values in measured.items():
                assert row[name] == pytest.approx(grid_task.mean(values))
                assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
            for gain, (a, b) in GAINS.items():
                assert row[gain] == pytest.approx(grid_task.mean(measured[a]) - grid_task.mean(measured[b]))
                first, second = (
                    np.array([[measured[name].get(f"{n}-{i}", np.nan) for n in range(3) for i in range(3)]])
                    for name in (a, b)
                )
                (expected,) = metrics.differences(first, second)
                bounds = [row[f"{gain}_{end}"] for end in ("low", "high", "p")]
                assert bounds == pytest.approx([expected.low, expected.high, expected.p])
    assert any(row["gain_rrs"] and row["gain_huber"] for row in result.rows)


def test_means(result: StudyPart) -> None:
    for name in (*COLUMNS, *GAINS):
        single = {keep: [row_of(result, keep, level)[name] for level in (0.5, 2.0)] for keep in (4, 16)}
        for keep, values in single.items():
            (row,) = [r for r in result.rows if r["keep"] == keep and r["corruption"] == "mean"]
            assert row[name] == pytest.approx(sum(values) / 2)
        assert row_of(result, "all", None)[name] == pytest.approx(sum(map(sum, single.values())) / 4)


def test_numbers_of_the_paper(result: StudyPart) -> None:
    names = [f"paper_{name}" for name in (*COLUMNS, *GAINS)]
    mild, severe = (row_of(result, 16, level) for level in (0.5, 2.0))
    assert [mild[name] for name in names] == [0.233, 0.254, 0.272, 0.021, 0.018]
    assert [severe[name] for name in names] == [0.185, 0.193, 0.222, 0.008, 0.029]
    (mean,) = [row for row in result.rows if row["keep"] == 16 and row["corruption"] == "mean"]
    assert [mean[name] for name in names] == pytest.approx([0.209, 0.2235, 0.247, 0.0145, 0.0235])
    for other in (row_of(result, 4, 0.5), row_of(result, "all", None)):
        assert {other[name] for name in names} == {None}
    assert f"(paper, LLaVA-1.5-7B on MM-Vet: {0.0145:+.3f} and {0.0235:+.3f})" in result.findings


def test_findings_and_files(result: StudyPart, tmp_path: Path) -> None:
    assert f"{3 * 2 * 2 * 2 * grid_task.FAILING} of 216 answers are left out: failed" in result.findings
    (row,) = [row for row in result.rows if row["keep"] == 4 and row["corruption"] == "mean"]
    assert f"k = 4, mean over levels: Clustering {row['clustering']:.3f}" in result.findings
    png, svg, table = result.save(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    with table.open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert [float(r["clustrs"]) for r in stored] == [r["clustrs"] for r in result.rows]


def test_what_is_clear_is_counted() -> None:
    def row(keep: int | str, low: float, high: float) -> dict[str, Any]:
        names = {f"{name}{end}": 0.5 for name in COLUMNS for end in ("", "_low", "_high")}
        paper = {f"paper_{name}": None for name in (*COLUMNS, *GAINS)}
        gains = {f"{gain}{end}": v for gain in GAINS for end, v in {"": 0.1, "_low": low, "_high": high}.items()}
        return {"corruption": "gaussian", "level": 1.0, "keep": keep, **names, **paper, **gains}

    text = ablation.findings([row(4, 0.05, 0.2), row(5, -0.1, 0.2), row(6, -0.2, -0.1)], "about")
    assert "RRS: clearly better in 1 and clearly worse in 1 of 3 cells" in text
    assert "RRS +0.100 [+0.050, +0.200]*." in text
    assert "RRS +0.100 [-0.100, +0.200]." in text


def test_the_same_command_answers_nothing_again(
    result: StudyPart, folder_of: Folders, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid_task.short_answers(monkeypatch)
    monkeypatch.setattr("clustrs.models.load.load_model", lambda *_: pytest.fail("nothing is left to do"))
    again = grid_task.run(ablation, folder_of("llava", "clip"), data, output, *WORDS)
    assert again.rows == result.rows
    with pytest.raises(ValueError, match=r"another configuration.*seeds"):
        grid_task.run(ablation, folder_of("llava", "clip"), data, output, *WORDS[:-5], "--seeds", 0, "--batch-size", 4)


def test_a_judge_comes_in_between(
    folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid_task.short_answers(monkeypatch)
    words = ("--set-task", "scoring=judged", "--keep", "4", "--levels", "2")
    given = (ablation, folder_of("llava", "clip"), data, tmp_path, *words)
    with pytest.raises(ValueError, match=r"`clustrs judge .*run --judge-model NAME`, then this command again"):
        grid_task.run(*given)
    pairs = {(row["item"], row["text"]) for row in grid_task.answers(tmp_path) if row["text"] is not None}
    with (tmp_path / "run" / "verdicts.jsonl").open("w") as file:
        for item, text in sorted(pairs):
            verdict = {"item": item, "text": text, "judge": "j", "round": 0, "score": grid_task.mark(item, text)}
            file.write(json.dumps({**verdict, "error": None}) + "\n")
    monkeypatch.setattr("clustrs.models.load.load_model", lambda *_: pytest.fail("nothing is left to do"))
    (row,) = grid_task.run(*given).rows
    for name, changed in COLUMNS.items():
        measured = grid_task.by_question(
            tmp_path, 4, "gaussian:2", changed, lambda row: grid_task.mark(row["item"], row["text"])
        )
        assert row[name] == pytest.approx(grid_task.mean(measured))
    with pytest.raises(ValueError, match="'other'"):
        grid_task.run(*given, "--judge-model", "other")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "x"), "--keep must be a count"),
        (("--keep", "4,4"), "--keep has a duplicate value: 4"),
        (("--levels", "one"), "--levels must be a number"),
        (("--seeds", "-1"), "--seeds must be an integer from 0"),
        (("--corrupt", "fogg"), "unknown corruption 'fogg'"),
        (("--set-task", "scoring"), "--set-task must be KEY=VALUE"),
        (("--task", "scene"), "unknown task 'scene'"),
        (("--batch-size", "0"), "--batch-size must be an integer from 1"),
    ],
)
def test_mistakes(folder_of: Folders, data: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_task.run(ablation, folder_of("llava", "clip"), data, tmp_path, *words)
    assert not (tmp_path / "run").exists()


def test_all_answers_failed(folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "0.png").write_bytes(b"no image")
    (bad / "questions.jsonl").write_text(json.dumps({"image": "0.png", "question": "Why?", "answer": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"no question could be answered: .*0\.png"):
        grid_task.run(ablation, folder_of("llava", "clip"), bad, tmp_path / "out", "--keep", 4, "--levels", 1)
