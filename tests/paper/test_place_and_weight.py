"""Place and weight: what is stored of its runs, and the tables that are made of it."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded_run

from clustrs.cli.base import parse
from clustrs.embedded import DEFAULT
from clustrs.evaluation.metrics import estimates
from clustrs.evaluation.results import Condition, load_run
from clustrs_paper.evidence import place_and_weight as place
from clustrs_paper.evidence.page import filled
from clustrs_paper.evidence.results import Answers, Stored, write_rows

ROOT = Path(__file__).parents[2]
MEASURED: list[dict[str, Any]] = [
    {"name": name, "keep": keep}
    for name in ("clustrs", "clustermeans", "divprune", "tome")
    for keep in (8, 16, 64, 144)
]
METHODS = [{"name": "none", "keep": 1.0}, *MEASURED]
CORRUPTIONS = ["clean", "gaussian:0.1", "gaussian:0.2", "salt_pepper:0.1"]


def right_or_wrong(rows: list[recorded_run.Row]) -> list[recorded_run.Row]:
    return [{**row, "score": float(row["score"] >= 0.5)} for row in rows]


def write_setting(folder: Path, setting: str, **changes: Any) -> Path:
    positions, attention = place.SETTINGS[setting]
    settings = {"methods": METHODS, "corruptions": CORRUPTIONS, "positions": positions, "attention": attention}
    return recorded_run.write_run(folder / place.run_folder(setting), right_or_wrong, **{**settings, **changes})


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The stored results of a model with the four settings; all have the same answers."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for setting in place.SETTINGS:
        whole = setting in (place.PUBLISHED, place.BOTH)
        write_setting(runs, setting, corruptions=CORRUPTIONS if whole else CORRUPTIONS[:2])
    write_rows(tmp_path / "made-up.csv", place.stored_rows(runs))
    return tmp_path


def test_numbers_are_those_of_every_second_question(stored: Path) -> None:
    run = load_run(stored / "runs" / "original-proportional")
    assert list(run.items) == sorted(run.items)
    with (stored / "made-up.csv").open() as file:
        rows = {
            (r["method"], r["keep"], r["corruption"], r["level"]): r
            for r in csv.DictReader(file)
            if (r["positions"], r["attention"]) == ("original", "proportional")
        }
    assert len(rows) == len(METHODS) * len(CORRUPTIONS)
    for m, method in enumerate(run.methods):
        for c, condition in enumerate(run.conditions):
            odd = [100 * run.scores[m, c, 0, item] for item in range(1, len(run.items), 2)]
            whole = [100 * run.scores[0, c, 0, item] for item in range(1, len(run.items), 2)]
            keep = "" if method.keep is None else str(method.keep)
            row = rows[method.name, keep, condition.name, condition.level_text]
            found = estimates(np.array([odd]))[0]
            assert (row["mean"], row["low"], row["high"]) == tuple(
                f"{v:.3f}" for v in (found.mean, found.low, found.high)
            )
            assert row["share"] == f"{100 * sum(odd) / sum(whole):.3f}"


def test_the_setting_is_picked_on_the_other_questions(tmp_path: Path) -> None:
    """The best on questions of odd index is not looked at; the best on those of even index is taken."""

    def only(half: int) -> Any:
        return lambda rows: [{**r, "score": float(int(r["item"].split("_")[1]) % 2 == half)} for r in rows]

    names = [f"v1_{item}" for item in range(8)]  # sorted: index = number
    for setting, half in ((place.PUBLISHED, 1), (place.BOTH, 0)):
        positions, attention = place.SETTINGS[setting]
        recorded_run.write_run(
            tmp_path / place.run_folder(setting),
            only(half),
            methods=METHODS,
            corruptions=CORRUPTIONS,
            positions=positions,
            attention=attention,
            items=len(names),
        )
    write_rows(tmp_path / "made-up.csv", place.stored_rows(tmp_path))
    assert place.picked(place.load("made-up", tmp_path)) == place.BOTH


def test_a_run_in_another_setting_is_refused(tmp_path: Path) -> None:
    write_setting(tmp_path, place.BOTH, attention="plain")
    with pytest.raises(ValueError, match="must be a run with original positions and proportional attention"):
        place.stored_rows(tmp_path)


def test_shares_are_of_the_unpruned_score_with_compact_positions(tmp_path: Path) -> None:
    """The base crop alone, unpruned, answers differently with the positions of the whole prompt."""
    write_setting(tmp_path, place.PUBLISHED)
    folder = write_setting(tmp_path, place.BOTH)
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    wrong = [{**line, "score": 0.0} if line["method"]["name"] == "none" else line for line in lines]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in wrong))
    rows = place.stored_rows(tmp_path)
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for before, after in zip(first, second, strict=True):
        assert after["share"] == ("0.000" if after["method"] == "none" else before["share"])


def test_without_the_run_as_published_nothing_is_stored(tmp_path: Path) -> None:
    write_setting(tmp_path, place.BOTH)
    with pytest.raises(ValueError, match="compact-plain' is missing: it has the unpruned scores"):
        place.stored_rows(tmp_path)


def test_incomplete_runs_are_refused(tmp_path: Path) -> None:
    folder = write_setting(tmp_path, place.BOTH)
    lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="a complete run with one seed"):
        place.stored_rows(tmp_path)


def test_shares_of_a_whole_grid_are_of_the_questions_that_all_were_asked() -> None:
    cells = {"clustrs": np.arange(300) % 2 > 0, "clustermeans": np.arange(60) >= 0, "divprune": np.arange(60) < 15}
    noise = Condition("gaussian", 0.2)
    right: dict[tuple[str, int | None, Condition], Any] = {}
    for m in (*place.FEW[1:], "fastervlm"):
        right[m, 16, place.CLEAN] = cells.get(m, np.arange(60) < 30)
        right[m, 16, noise] = np.arange(120) < (24 if m == "tome" else 12)
    right["none", None, place.CLEAN], right["none", None, noise] = np.arange(300) < 60, np.arange(300) < 48
    found = place.kept_with_both(Stored("made-up", Answers("", "", right), both=Answers("", "", right)))
    expected = ("ClustRS 50 / 25 %", "ClusterMeans 100 / 25 %", "DivPrune 25 / 25 %", "ToMe 50 / 50 %")
    assert found == ", ".join([*expected, "FasterVLM 50 / 25 %"])


def test_a_report_has_every_method_and_both_settings(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(place.QUESTIONS, "made-up", 12)
    monkeypatch.setitem(place.NOISE, "made-up", ("gaussian:0.1", "gaussian:0.2", "salt_pepper:0.1"))
    text = place.report("made-up", stored)
    _, published, both = re.split(r"^## (?:As published|Both)", text, flags=re.M)
    for part in (published, both.partition("## Repeating it")[0]):
        for label in ("ClustRS (the paper)", "**ClusterMeans** (ours)", "DivPrune", "ToMe"):
            assert [line.split(" | ")[1] for line in part.splitlines() if line.startswith(f"| {label} |")] == [
                "8",
                "16",
                "64",
                "144",
            ]
    assert "--positions compact --attention proportional" in text


@pytest.mark.parametrize("model", place.QUESTIONS)
@pytest.mark.parametrize("setting", place.SETTINGS)
def test_the_commands_are_those_of_the_command_line(model: str, setting: str) -> None:
    given = parse(["eval", "--model", model, *place.eval_options(model, setting)])
    assert (given["positions"], given["attention"]) == place.SETTINGS[setting]
    assert given["limit"] == place.QUESTIONS[model]


def test_the_tables_of_the_pages_are_those_of_the_stored_runs() -> None:
    for path, name, block in place.blocks():
        text = path.read_text(encoding="utf-8")
        assert text == filled(text, block, name), path
    for model in place.QUESTIONS:
        if place.load(model):
            path = place.STORED / f"{model}-report.md"
            assert path.read_text(encoding="utf-8") == place.report(model)


def test_the_numbers_of_every_method_are_those_of_the_stored_run() -> None:
    """Read without the code that writes them: clean cells are rows of the table, noisy ones means of four."""
    with (ROOT / "docs" / "results" / "place-and-weight" / f"{DEFAULT}.csv").open() as file:
        rows = list(csv.DictReader(file))
    text = (ROOT / "docs" / "place-and-weight.md").read_text().partition("<!-- methods -->")[2]
    settings = [("compact", "plain"), ("original", "proportional")]
    names = {"ClusterMeans (ours)": "clustermeans", "ClustRS (the paper)": "clustrs"}
    shown = re.findall(r"^\| (.+?) \| (\d\S+ / .+) \|$", text, re.M)
    assert len(shown) == 9
    for label, cells in shown:
        method = names.get(label.replace("*", ""), label.lower())
        for keep, cell_pair in zip(("16", "64"), zip(*[iter(cells.split(" | "))] * 2, strict=True), strict=True):
            for i, setting in enumerate(settings):
                own = {
                    (r["method"], r["corruption"], r["level"]): float(r["mean"])
                    for r in rows
                    if (r["positions"], r["attention"]) == setting and r["keep"] in ("", keep)
                }
                conditions = sorted({(c, level) for m, c, level in own if m == "none"})
                assert len(conditions) == 5
                for cell, chosen in zip(cell_pair, (conditions[:1], conditions[1:]), strict=True):
                    mean = sum(own[method, *c] for c in chosen) / len(chosen)
                    assert cell.split(" / ")[i] == f"{mean:.1f}", (label, setting, keep)


def test_the_positions_in_the_docs_are_the_measured_ones() -> None:
    """Means over methods, budgets and corruptions on the questions of odd index."""
    with (place.STORED / "positions.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] != "none"]
    text = (ROOT / "docs" / "place-and-weight.md").read_text()
    shown = re.findall(r"^\| (photo-llava|mini-llava) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(shown) == 2
    for model, *cells in shown:
        for kind, cell in zip(("compact", "original", "closed"), cells, strict=True):
            odd = [float(row["odd"]) for row in rows if (row["model"], row["positions"]) == (model, kind)]
            assert len(odd) == 8
            assert cell == f"{sum(odd) / len(odd):.1f}"
