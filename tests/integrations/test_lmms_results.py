"""Result files of lmms-eval as runs: which metric, which questions, what is left aside."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from clustrs.cli import main
from clustrs.evaluation.results import load_run
from clustrs_lmms.engine import read_arguments
from clustrs_lmms.results import RUNS, import_results

CLUSTRS = {"method": "clustrs", "keep": 16}
SCORES = {"first": [1.0, 0.0, 1.0, 1.0], "second": [0.0, 0.0, 1.0, 0.0]}


def write(
    folder: Path,
    date: str,
    arguments: dict[str, Any],
    samples: list[Any] | None,
    total: float,
    task: str = "pope",
    others: dict[str, Any] | None = None,
) -> Path:
    """A result file as lmms-eval 0.7.3 writes it, and its samples."""
    record = read_arguments({"pretrained": "llava-hf/llava-1.5-7b-hf", **arguments}).to_json()
    tokens = {"questions": 4, "unpruned_tokens": 576.0, "visual_tokens": 16.0}
    content = {
        "results": {task: {"alias": task, "acc,none": total, "samples": 4, "acc_stderr,none": 0.1, **(others or {})}},
        "configs": {task: {"task": task}},
        "n-samples": {task: {"original": 4, "effective": 4}},
        "config": {"model": "clustrs", "batch_sizes": [{**record, "lmms_eval": "0.7.3", "tasks": {task: tokens}}]},
        "lmms_eval_version": "0.7.3",
    }
    inside = folder / "llava-hf__llava-1.5-7b-hf"
    inside.mkdir(parents=True, exist_ok=True)
    path = inside / f"{date}_results.json"
    path.write_text(json.dumps(content))
    if samples is not None:
        lines = [
            {"doc_id": number, "target": "yes", "filtered_resps": "no", "input": "Is it?", "acc": score}
            for number, score in enumerate(samples)
        ]
        (inside / f"{date}_samples_{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def imported(folder: Path, metric: str | None = None) -> tuple[list[Path], list[str]]:
    told: list[str] = []
    return import_results(folder, metric, told.append), told


def test_cells_make_one_run(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", {"method": "none"}, SCORES["first"], 0.75)
    write(tmp_path, "20260101_100100", CLUSTRS, SCORES["first"], 0.75)
    write(tmp_path, "20260101_100200", {**CLUSTRS, "corrupt": "gaussian:0.5"}, SCORES["second"], 0.25)
    write(tmp_path, "20260101_100300", {**CLUSTRS, "corrupt": "gaussian:0.5", "batch_size": 8, "seed": 1}, [1] * 4, 1)
    (folder,), told = imported(tmp_path)
    assert told == []
    assert folder == tmp_path / RUNS / "llava-hf_llava-1.5-7b-hf-pope"
    run = load_run(folder)
    assert [str(condition) for condition in run.conditions] == ["clean", "gaussian:0.5"]
    assert run.seeds == (0, 1)
    assert [method.label for method in run.methods] == ["none", "clustrs"]
    assert run.scores[1, 0, 0].tolist() == SCORES["first"]
    assert run.scores[1, 1].tolist() == [SCORES["second"], [1.0] * 4]
    assert run.visual_tokens.tolist() == [16.0, 16.0]
    assert run.unpruned_tokens.tolist() == [576.0, 576.0]
    assert (run.scale, run.config["metric"], run.totals_only) == (100.0, "acc", False)


def test_the_report_is_that_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "20260101_100000", {"method": "none"}, [1.0] * 4, 1.0)
    write(tmp_path, "20260101_100100", CLUSTRS, SCORES["first"], 0.75)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "75.0" in printed
    page = (tmp_path / RUNS / "llava-hf_llava-1.5-7b-hf-pope" / "report.html").read_text()
    assert "Retention" in page
    assert "3 %" in page
    assert "--latency" not in page
    first = page
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / RUNS / "llava-hf_llava-1.5-7b-hf-pope" / "report.html").read_text() == first


def test_budgets_have_rows_and_curves(tmp_path: Path) -> None:
    totals = {("16", "clean"): 0.5, ("16", "gaussian"): 0.25, ("64", "clean"): 1.0, ("64", "gaussian"): 0.75}
    for minute, ((keep, corrupt), total) in enumerate(totals.items()):
        given = {"keep": int(keep), "corrupt": "clean" if corrupt == "clean" else f"{corrupt}:0.5"}
        scores = [float(number < 4 * total) for number in range(4)]
        write(tmp_path, f"20260101_10{minute:02}00", given, scores, total)
    assert main(["report", str(tmp_path)]) == 0
    folder = tmp_path / RUNS / "llava-hf_llava-1.5-7b-hf-pope"
    with (folder / "report.csv").open() as file:
        rows = {(row["keep"], row["corruption"]): float(row["mean"]) / 100 for row in csv.DictReader(file)}
    assert rows == totals
    (curves,) = folder.glob("report-curves-*.pdf")
    assert curves.stat().st_size > 0


def test_scores_inside_objects_and_per_cents(tmp_path: Path) -> None:
    """POPE logs an object per question; ScienceQA and others give their total in per cent."""
    write(tmp_path, "20260101_100000", CLUSTRS, [{"score": score, "prediction": "no"} for score in SCORES["first"]], 75)
    (folder,), told = imported(tmp_path)
    assert told == []
    assert load_run(folder).scores[0, 0, 0].tolist() == SCORES["first"]


@pytest.mark.parametrize(
    ("samples", "total", "score", "scale"),
    [
        (None, 0.75, 0.75, 100.0),
        (None, 75.0, 0.75, 100.0),
        (None, 1510.5, 0.15105, 10_000.0),
        (SCORES["first"], 0.6, 0.6, 100.0),
        ([["yes", "no"]] * 4, 0.5, 0.5, 100.0),
        ([3.0, 4.0, 5.0, 2.0], 3.5, 0.035, 100.0),
    ],
    ids=["no samples", "in per cent", "beyond 100", "another aggregation", "no numbers", "scores beyond 1"],
)
def test_totals_where_questions_have_no_score(
    tmp_path: Path, samples: list[Any] | None, total: float, score: float, scale: float
) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, samples, total)
    (folder,), told = imported(tmp_path)
    assert "20260101_100000_results.json has no score of acc per question" in told[0]
    run = load_run(folder)
    assert run.scores[0, 0, 0].tolist() == pytest.approx([score])
    assert (run.scale, run.totals_only, run.config["questions"]) == (scale, True, 4)


def test_totals_and_samples_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", {"method": "none"}, SCORES["first"], 0.75)
    write(tmp_path, "20260101_100100", CLUSTRS, None, 0.5)
    (folder,), _ = imported(tmp_path)
    run = load_run(folder)
    assert run.scores[:, 0, 0].tolist() == [[0.75], [0.5]]


def test_a_metric_by_name(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, None, 0.75, others={"f1,none": 0.5, "note,none": "n/a"})
    (folder,), _ = imported(tmp_path, "f1")
    assert load_run(folder).scores[0, 0, 0].tolist() == [0.5]
    with pytest.raises(ValueError, match="--metric note: pope has acc, f1"):
        imported(tmp_path, "note")


def test_the_newer_of_two_results_counts(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, SCORES["first"], 0.75)
    write(tmp_path, "20260101_110000", CLUSTRS, SCORES["second"], 0.25)
    (folder,), told = imported(tmp_path)
    assert load_run(folder).scores[0, 0, 0].tolist() == SCORES["second"]
    assert told == [
        "20260101_100000_results.json: 20260101_110000_results.json has pope with the same settings and is newer"
    ]


def test_tasks_and_settings_make_runs_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, SCORES["first"], 0.75)
    write(tmp_path, "20260101_100100", CLUSTRS, SCORES["first"], 0.75, task="gqa")
    write(tmp_path, "20260101_100200", {**CLUSTRS, "prompt_template": "vicuna_v1"}, SCORES["second"], 0.25)
    folders, _ = imported(tmp_path)
    assert [folder.name.rpartition("7b-hf-")[2] for folder in folders] == ["pope", "gqa", "pope-2"]


def test_other_models_are_left_aside(tmp_path: Path) -> None:
    path = write(tmp_path, "20260101_100000", CLUSTRS, None, 0.75)
    content = json.loads(path.read_text())
    content["config"] = {"model": "llava_hf", "batch_sizes": []}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="none of its results is of --model clustrs"):
        imported(tmp_path)
    write(tmp_path, "20260101_100100", CLUSTRS, None, 0.75)
    _, told = imported(tmp_path)
    assert told[0] == f"{path}: the model is 'llava_hf', left aside"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": 3}, "results must be dict, got 3"),
        ({"config": {"batch_sizes": [{"clustrs": "0.1.0"}]}}, "pretrained must be str, got nothing"),
        (
            {"config": {"batch_sizes": [{"clustrs": "0.1.0", "pretrained": "a", "method": 3}]}},
            "method must be dict, got 3",
        ),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, "20260101_100000", CLUSTRS, None, 0.75)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"20260101_100000_results.json.*{message}"):
        imported(tmp_path)


def test_negative_totals_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, None, -0.5)
    with pytest.raises(ValueError, match=r"scores must not be negative, got -0\.5"):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "2"], "--images, --latency and --judge-model need a run of clustrs eval"),
        (["--metric", "f1"], "--metric f1: pope has acc"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "20260101_100000", CLUSTRS, None, 0.75)
    assert main(["report", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_metric_is_for_results_of_lmms_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--metric", "acc"]) == 2
    assert "--metric acc needs results of lmms-eval" in capsys.readouterr().err
