"""MM-Vet's grade files go in as the official evaluator wrote them, and give the totals that it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from evaluation.task_files import real, vet, write_json

from clustrs.evaluation.results import load_run
from clustrs.evaluation.tasks import get_task
from clustrs_paper.exchange import Grades, holds_grades, import_run, read_grades, totals

Run = Callable[..., tuple[int, str, str]]
CAPABILITIES = [["ocr", "math"], ["rec"], ["rec", "know"], ["ocr"]]
MARKS = {"v1_0": [0.5, 0.4, 0.5], "v1_1": [1.0, 1.0, 0.9], "v1_2": [0.0, 0.0, 0.3], "v1_3": [0.1, 0.7, 0.2]}


def entry(marks: list[Any], judge: str = "gpt-4-0613") -> dict[str, Any]:
    return {"model": [judge] * len(marks), "content": [str(mark) for mark in marks], "score": marks}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    questions = {f"v1_{i}": vet(capability=kinds) for i, kinds in enumerate(CAPABILITIES)}
    write_json(tmp_path / "mm-vet" / "mm-vet.json", questions)
    return tmp_path / "mm-vet"


@pytest.fixture
def grade_file(tmp_path: Path) -> Path:
    path = tmp_path / "llava-v1.5-7b_gpt-4-0613-grade-3runs.json"
    path.write_text(json.dumps({item: entry(marks) for item, marks in MARKS.items()}, indent=4))
    return path


def by_hand(marks: dict[str, list[float]], kinds: dict[str, list[str]]) -> dict[str, Any]:
    """The official evaluator's columns, one sum after another."""
    runs = len(next(iter(marks.values())))
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(kind for own in kinds.values() for kind in own):
        asked = [item for item in marks if name in kinds[item]]
        each = [100 * sum(marks[item][run] for item in asked) / len(asked) for run in range(runs)]
        columns[name] = round(sum(each) / runs, 1)
    each = [100 * sum(own[run] for own in marks.values()) / len(marks) for run in range(runs)]
    columns |= {"total": round(sum(each) / runs, 1), "std": round(pstdev(each), 1)}
    return columns | {"runs": [round(value, 1) for value in each]}


def test_totals_of_a_small_file(data: Path, grade_file: Path) -> None:
    found = totals(read_grades(grade_file), get_task("mmvet", data).items)
    # runs: 1.6, 2.1 and 1.9 of 4; their mean 46.67, their population standard deviation 5.14
    assert (found.total, found.std, found.runs) == (46.7, 5.1, (40.0, 52.5, 47.5))
    assert found.capabilities == {"ocr": 40.0, "rec": 53.3, "math": 46.7, "know": 10.0}
    assert list(found.capabilities)[:2] == ["ocr", "rec"]  # those of most questions first


def test_totals_of_all_official_questions(tmp_path: Path) -> None:
    task = get_task("mmvet", real("mm-vet"))
    marks = {item.id: [(7 * i + 3 * run * i + run) % 11 / 10 for run in range(5)] for i, item in enumerate(task.items)}
    path = tmp_path / "m_gpt-4-0613-grade-5runs.json"
    path.write_text(json.dumps({item: entry(own) for item, own in marks.items()}))
    found = totals(read_grades(path), task.items)
    expected = by_hand(marks, {item.id: list(item.kinds) for item in task.items})
    assert {**found.capabilities, "total": found.total, "std": found.std, "runs": list(found.runs)} == expected
    assert list(found.capabilities) == ["rec", "ocr", "know", "gen", "spat", "math"]
    sets: dict[frozenset[str], list[float]] = {}
    for item in task.items:
        sets.setdefault(frozenset(item.kinds), []).append(sum(marks[item.id]) / 5)
    assert {frozenset(name.split("_")): value for name, value in found.integrations.items()} == {
        kinds: pytest.approx(100 * sum(own) / len(own), abs=0.0501) for kinds, own in sets.items()
    }
    assert len(sets) == 16
    sizes = [len(sets[frozenset(name.split("_"))]) for name in found.integrations]
    assert sizes == sorted(sizes, reverse=True)


def test_import_of_a_grade_file_alone(run: Run, data: Path, grade_file: Path, tmp_path: Path) -> None:
    words = ("--task", "mmvet", "--data", data, "--format", "mmvet", "--name", "llava-v1.5-7b")
    code, out, err = run("import-answers", grade_file, *words, "-o", tmp_path / "run")
    assert code == 0
    assert err == "the file has scores only: answers are recorded without their words (--grades takes both)\n"
    assert (
        "as MM-Vet's evaluator prints it (4 of 4 questions, judge gpt-4-0613):\n"
        "ocr 40.0, rec 53.3, math 46.7, know 10.0, total 46.7, std 5.1, runs [40.0, 52.5, 47.5]\n"
        "ocr_math 46.7, rec 96.7, rec_know 10.0, ocr 33.3, total 46.7, std 5.1, runs [40.0, 52.5, 47.5]\n"
    ) in out
    loaded = load_run(tmp_path / "run")
    assert loaded.judge == "gpt-4-0613"
    expected = {item: sum(marks) / 3 for item, marks in MARKS.items()}
    assert dict(zip(loaded.items, loaded.scores[0, 0, 0], strict=True)) == pytest.approx(expected)
    verdicts = [json.loads(line) for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    assert len(verdicts) == 12
    assert {(v["item"], v["round"]): v["score"] for v in verdicts} == {
        (item, number): mark for item, marks in MARKS.items() for number, mark in enumerate(marks)
    }


def test_import_of_predictions_with_their_grades(run: Run, data: Path, grade_file: Path, tmp_path: Path) -> None:
    texts = {item: f"answer {item}" for item in MARKS}
    write_json(tmp_path / "llava-v1.5-7b.json", texts)
    words = ("--task", "mmvet", "--data", data, "--format", "mmvet", "--grades", grade_file)
    code, out, err = run("import-answers", tmp_path / "llava-v1.5-7b.json", *words, "-o", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "total 46.7, std 5.1, runs [40.0, 52.5, 47.5]" in out
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert {record["item"]: record["text"] for record in records} == texts
    assert load_run(tmp_path / "run").count(1) == 4
    assert "46.7" in (tmp_path / "run" / "report.md").read_text()


def test_replies_without_a_number_are_counted(run: Run, data: Path, tmp_path: Path) -> None:
    """The official evaluator scores them 0 after five tries, and so does an import, but it says so."""
    content = {item: entry(marks[:1]) for item, marks in MARKS.items()}
    content["v1_2"]["content"] = ["Correct"]
    content["v1_1"]["content"] = ["1.0 |"]
    write_json(tmp_path / "grades.json", content)
    assert read_grades(tmp_path / "grades.json").without_number == 1
    words = ("--task", "mmvet", "--data", data, "--format", "mmvet", "-o", tmp_path / "run")
    code, out, err = run("import-answers", tmp_path / "grades.json", *words)
    assert code == 0
    assert "total 40.0, std 0.0, runs [40.0]" in out
    assert "1 of the scores are 0 because the judge's reply was no number" in err


def test_some_questions_only(run: Run, data: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "grades.json", {"v1_1": entry([0.5])})
    words = ("--task", "mmvet", "--data", data, "--format", "mmvet", "-o", tmp_path / "run")
    code, out, _ = run("import-answers", tmp_path / "grades.json", *words)
    assert code == 0
    assert "(1 of 4 questions, judge gpt-4-0613):\nrec 50.0, total 50.0" in out
    assert load_run(tmp_path / "run").errors == {"no prediction": 3}


def test_several_judges_are_named(tmp_path: Path) -> None:
    write_json(tmp_path / "grades.json", {"v1_0": entry([0.5], "gpt-4-b"), "v1_1": entry([0.5], "gpt-4-a")})
    assert read_grades(tmp_path / "grades.json").judge == "gpt-4-a + gpt-4-b"


def test_what_is_a_grade_file(tmp_path: Path, grade_file: Path) -> None:
    assert holds_grades(grade_file)
    for content in ('{"v1_0": "text"}', '{"v1_0": {"v1_1": "a"}}', "[]", "{}", "{", "[" * 100_000):
        (tmp_path / "other.json").write_text(content)
        assert not holds_grades(tmp_path / "other.json")
    assert not holds_grades(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "holds no grades"),
        ("[]", "expected an object, got"),
        ({"v1_0": 0.5}, "v1_0 must be dict, got 0.5"),
        ({"v1_0": {"score": [0.5]}}, "'v1_0': model must be list, got nothing"),
        ({"v1_0": {**entry([0.5]), "score": 0.5}}, "'v1_0': score must be a list of numbers from 0 to 1, got 0.5"),
        ({"v1_0": {**entry([0.5]), "score": [0.5, 0.5]}}, "'v1_0': model, content and score must have one entry"),
        ({"v1_0": entry([])}, r"'v1_0': score must be a list of numbers from 0 to 1, got \[\]"),
        ({"v1_0": entry([1.5])}, r"'v1_0': score must be a list of numbers from 0 to 1, got \[1.5\]"),
        ({"v1_0": entry([True])}, r"'v1_0': score must be .* got \[True\]"),
        ({"v1_0": entry(["0.5"])}, r"'v1_0': score must be .* got \['0.5'\]"),
        ({"v1_0": entry([0.5, 0.5]), "v1_1": entry([0.5])}, "'v1_1' must have 2 judge runs as others, got 1"),
    ],
)
def test_bad_grade_files(tmp_path: Path, content: Any, message: str) -> None:
    write_json(tmp_path / "grades.json", content)
    with pytest.raises(ValueError, match=message) as caught:
        read_grades(tmp_path / "grades.json")
    assert "grades.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grades_that_do_not_belong(data: Path, tmp_path: Path) -> None:
    task = get_task("mmvet", data)
    texts = dict.fromkeys(MARKS, "text")
    for grades, message in (
        (Grades("j", {"v1_9": (0.5,)}, 0), "the grades have 'v1_9', which the task does not"),
        (Grades("j", {"v1_3": (0.5,)}, 0), "the grades have 'v1_3', which has no prediction"),
    ):
        with pytest.raises(ValueError, match=message):
            import_run(task, {"v1_0": texts["v1_0"]}, "m", tmp_path / "run", grades)
    scenes = get_task("scenes", limit=1)
    with pytest.raises(ValueError, match="scenes scores the answers itself"):
        import_run(scenes, {scenes.items[0].id: "x"}, "m", tmp_path / "run", Grades("j", {}, 0))
    assert not (tmp_path / "run").exists()
