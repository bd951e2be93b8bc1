"""Reading a record: what it says, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from recorded_run import CONFIG, METHODS, Row, failed, rows_of, write_run

from clustrs.evaluation.report import write_report
from clustrs.evaluation.results import FAILED, MISSING, SCORED, UNJUDGED, Condition, load_run


def test_a_cell_has_its_answers(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> list[Row]:
        return [failed(row) if row["item"] == "v1_3" else row for row in rows if row["item"] != "v1_7"][::-1]

    run = load_run(write_run(tmp_path, change))
    assert (run.expected, run.present) == (5 * 5 * 12, 5 * 5 * 11)
    assert (run.count(MISSING), run.count(FAILED), run.count(UNJUDGED)) == (25, 25, 0)
    index = run.find("clustrs", "8"), run.conditions.index(Condition("jpeg", 30.0)), 0
    assert index[0] is not None
    states, scores = run.states[index], run.scores[index]
    found = {
        item: (state, None if np.isnan(score) else score)
        for item, state, score in zip(run.items, states, scores, strict=True)
        if state != MISSING
    }
    wanted = {
        row["item"]: (SCORED, row["score"])
        for row in rows_of(CONFIG)
        if row["method"] == METHODS[4] and row["corruption"] == "jpeg:30" and row["item"] != "v1_7"
    }
    assert found == {**wanted, "v1_3": (FAILED, None)}


def test_conditions_go_from_mild_to_severe(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, corruptions=["jpeg:30", "gaussian:2", "clean", "jpeg:60", "gaussian:0.5"]))
    assert [str(condition) for condition in run.conditions] == [
        "clean",
        "jpeg:60",
        "jpeg:30",
        "gaussian:0.5",
        "gaussian:2",
    ]


def test_labels_tell_apart_what_differs(tmp_path: Path) -> None:
    clustrs = {"name": "clustrs", "keep": 4, "tau": 1.0, "clip": [0.1, 0.95], "shrink": True}
    methods = [{"name": "none", "keep": None}, clustrs, {**clustrs, "tau": 2.0}, {**clustrs, "keep": 8, "tau": 2.5}]
    run = load_run(write_run(tmp_path, methods=methods))
    assert [method.label for method in run.methods] == ["none", "clustrs", "clustrs tau=2", "clustrs tau=2.5"]
    run = load_run(write_run(tmp_path, methods=[clustrs, {**clustrs, "clip": [0.0, 1.0], "shrink": False}]))
    assert [method.label for method in run.methods] == ["clustrs", "clustrs clip=[0,1] shrink=false"]
    run = load_run(write_run(tmp_path, methods=[clustrs, {**clustrs, "representative": "medoid"}]))
    assert [method.label for method in run.methods] == ["clustrs", "clustrs representative=medoid"]


def test_counts_and_shares_are_different_budgets(tmp_path: Path) -> None:
    run = load_run(
        write_run(tmp_path, lambda rows: [], methods=[{"name": "grid", "keep": k} for k in (1.0, 0.5, 12, 1)])
    )
    assert run.budgets == ("1", "12", "0.5", "1.0")
    assert [run.find("grid", budget) for budget in run.budgets] == [3, 2, 1, 0]


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    torn = '{"item": "v1_0", "pict'
    whole = load_run(write_run(tmp_path / "a", lambda rows: rows[:-1]))
    run = load_run(write_run(tmp_path / "b", lambda rows: rows[:-1], end=torn))
    assert run.present == whole.present == 299
    with pytest.raises(ValueError, match=r"answers.jsonl' line 301: not JSON"):
        load_run(write_run(tmp_path / "c", end=torn + "\n"))


def test_scores_come_from_the_judge(tmp_path: Path) -> None:
    def unjudged(rows: list[Row]) -> list[Row]:
        return [{**row, "score": None, "text": "yes" if row["item"] == "v1_0" else "no"} for row in rows]

    folder = write_run(tmp_path, unjudged, judged=True)
    run = load_run(folder)
    assert (run.judge, run.count(UNJUDGED)) == (None, 300)
    write_report(folder)
    assert "300 answers not judged yet" in (folder / "report.md").read_text()

    verdicts = [
        {"item": "v1_0", "text": "yes", "judge": "a", "round": 0, "score": None, "error": "timed out"},
        {"item": "v1_0", "text": "yes", "judge": "a", "round": 0, "score": 0.7, "error": None},
        {"item": "v1_0", "text": "yes", "judge": "a", "round": 1, "score": 0.2, "error": None},
        {"item": "v1_0", "text": "no", "judge": "a", "round": 0, "score": 1.0, "error": None},
        {"item": "v1_1", "text": "no", "judge": "a", "round": 0, "score": None, "error": "no number"},
        {"item": "v1_2", "text": "no", "judge": "b", "round": 0, "score": 0.5, "error": None},
    ]
    (folder / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verdicts) + '{"item": "v1_')
    with pytest.raises(ValueError, match=r"several judges: choose one of a, b"):
        load_run(folder)
    with pytest.raises(ValueError, match=r"judge must be one of a, b .* got 'c'"):
        load_run(folder, "c")
    run = load_run(folder, "a")
    assert run.judge == "a"
    assert run.count(UNJUDGED) == 300 - 25
    assert (run.items[0], run.states[0, 0, 0, 0]) == ("v1_0", SCORED)
    assert run.scores[0, 0, 0, 0] == pytest.approx(0.45)
    assert run.judge_errors == {"no number": 1}
    assert load_run(folder, "b").count(UNJUDGED) == 275
    with pytest.raises(ValueError, match=r"judge must be None, the answers of this run need no judge, got 'a'"):
        load_run(write_run(tmp_path / "plain"), "a")


BAD_ROWS: list[tuple[Row, str]] = [
    ({"item": 3}, "item must be str, got 3"),
    ({"kinds": [1]}, "kinds must be"),
    ({"method": {"name": "clustrs", "keep": 5}}, "method .* is not in config.json"),
    ({"method": "clustrs"}, "method must be dict, got 'clustrs'"),
    ({"corruption": "fog:1"}, "corruption 'fog:1' is not in config.json"),
    ({"corruption": ["clean"]}, "corruption must be str"),
    ({"seed": 1}, "seed 1 is not in config.json"),
    ({"seed": False}, "seed must be int, got False"),
    ({"text": None}, "text and kept must be given where there is no error, got null"),
    ({"score": 1.5}, "score must be a number from 0 to 1 or null, got 1.5"),
    ({"score": True}, "score must be .* got True"),
    ({"score": float("nan")}, "not JSON"),
    ({"kept": "abc"}, "kept must be .* got 'abc'"),
    ({"kept": [1, "2"]}, r"kept must be token indices from 0 .or -1 for CLS. or null, got \[1, '2'\]"),
    ({"kept": None}, "text and kept must be given where there is no error, got null"),
    ({"kept": [2**40]}, "kept must be token indices from 0"),
    ({"kept": [-2]}, "or -1 for CLS"),
    ({"score": -(10**400)}, "score must be .* got -1000"),
    ({"error": 3}, "error must be .* got 3"),
    ({"item": "v1_1"}, "'v1_1' was answered with this method, corruption and seed before"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_bad_answers_are_refused(change: Row, message: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, lambda rows: [*rows[:5], {**rows[5], **change}, *rows[6:]])
    with pytest.raises(ValueError, match=rf"answers.jsonl' line 6: .*{message}"):
        load_run(folder)


@pytest.mark.parametrize("line", ["[]", "3", "[" * 100_000, '{"item": "\xff'])
def test_lines_that_are_no_answers(line: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "answers.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"answers.jsonl' line 1: "):
        load_run(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": None}, "task must be str, got None"),
        ({"methods": []}, "methods must be a list of dict"),
        ({"methods": ["clustrs"]}, "methods must be a list of dict"),
        ({"methods": [{"keep": 4}]}, "name must be a name, got nothing"),
        ({"methods": [{"name": "clustrs"}]}, "keep must be a count or a fraction, got nothing"),
        ({"methods": [METHODS[0], METHODS[0]]}, "two of them are the same"),
        ({"corruptions": ["clean", "clean"]}, "must not repeat"),
        ({"corruptions": ["gaussian"]}, "corruptions of config.json must be clean or NAME:LEVEL, got 'gaussian'"),
        ({"corruptions": ["gaussian:nan"]}, "clean or NAME:LEVEL"),
        ({"seeds": [True]}, "seeds must be a list of int"),
        ({"items": 0}, "items must be .* got 0"),
        ({"items": 11}, "11"),
        ({"judged": "no"}, "judged must be bool, got 'no'"),
        ({"scale": 0}, "scale must be a number above 0, got 0"),
    ],
)
def test_bad_configurations_are_refused(settings: Row, message: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    with pytest.raises(ValueError, match=message):
        load_run(folder)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no config.json, it is not the folder of a run"):
        load_run(tmp_path)
    (write_run(tmp_path) / "answers.jsonl").unlink()
    with pytest.raises(ValueError, match=r"answers.jsonl' cannot be read"):
        load_run(tmp_path)
