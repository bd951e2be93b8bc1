"""Runs are found under one folder and nowhere else; disagreements are those of the records."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_run import Row, write_run

from clustrs.app import markup
from clustrs.app.results import Disagreement, OpenRun, RunLibrary, disagreements, kept_images
from clustrs.app.trial import LoadedModel
from clustrs.evaluation.report.document import marker_path
from clustrs.evaluation.report.scores import figures
from clustrs.palette import MARKERS, OTHER_MARKERS


@pytest.fixture
def opened(tmp_path: Path) -> OpenRun:
    write_run(tmp_path / "made-up")
    return RunLibrary(tmp_path).open("made-up")


def index(opened: OpenRun, label: str, budget: str = "4") -> int:
    return next(m for m in opened.methods(budget) if opened.summary.label(m) == label)


def clean_disagreements(opened: OpenRun) -> list[Disagreement]:
    """Between ClustRS and the unpruned model, on clean images."""
    first, second = index(opened, "ClustRS"), index(opened, "unpruned")
    return disagreements(opened, first, second, opened.conditions("gaussian")[0])


def test_runs_are_listed_newest_first_below_the_folder(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "deep"]):
        folder = tmp_path / ("sub/deep" if name == "deep" else name)
        folder.parent.mkdir(exist_ok=True)
        write_run(folder)
        os.utime(folder / "answers.jsonl", (10_000 - age, 10_000 - age))
    (tmp_path / "no-run").mkdir()
    write_run(tmp_path / ".hidden")
    assert RunLibrary(tmp_path).names() == ["new", "old", "sub/deep"]
    assert RunLibrary(tmp_path / "new").names() == ["."]
    assert RunLibrary(tmp_path / "missing").names() == []


@pytest.mark.parametrize("name", ["../outside", "/etc", "inside/../../outside", "..", "", "nothing", "a\0b"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "outside")
    write_run(tmp_path / "runs" / "inside")
    with pytest.raises(ValueError, match="there is no such run under"):
        RunLibrary(tmp_path / "runs").open(name)


def test_absolute_name_of_a_run_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    outside = write_run(tmp_path / "outside")
    with pytest.raises(ValueError, match="there is no such run under"):
        RunLibrary(tmp_path / "runs").open(str(outside))


def test_links_that_lead_out_are_neither_listed_nor_opened(tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", write_run(tmp_path / "outside")
    runs.mkdir()
    (runs / "folder").symlink_to(outside)
    for name in ("config.json", "answers.jsonl"):
        made = write_run(runs / f"linked-{name}")
        (made / name).unlink()
        (made / name).symlink_to(outside / name)
    made = write_run(runs / "linked-verdicts")
    (made / "verdicts.jsonl").symlink_to(tmp_path / "elsewhere")
    write_run(runs / "own")
    library = RunLibrary(runs)
    assert library.names() == ["own"]
    for name in ("folder", "linked-config.json", "linked-answers.jsonl", "linked-verdicts"):
        with pytest.raises(ValueError, match="there is no such run under"):
            library.open(name)


def test_link_inside_the_folder_and_a_linked_folder_itself_work(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert RunLibrary(tmp_path).open("link").run.config["model"] == "mini-llava"
    (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    assert "run" in RunLibrary(tmp_path.parent / f"{tmp_path.name}-link").names()


def test_run_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    library = RunLibrary(tmp_path)
    before = library.open("run")
    assert library.open("run") is before
    shutil.rmtree(folder)
    write_run(folder, lambda rows: rows[:-7])
    assert library.open("run").run.present == before.run.present - 7


def test_filters_and_what_they_refuse(opened: OpenRun) -> None:
    assert opened.corruptions() == ["gaussian", "jpeg"]
    assert [str(opened.run.conditions[c]) for c in opened.conditions("gaussian")] == [
        "clean",
        "gaussian:0.5",
        "gaussian:2",
    ]
    assert [opened.summary.label(m) for m in opened.methods("8")] == ["unpruned", "FasterVLM", "ClustRS"]
    with pytest.raises(ValueError, match="corruption 'fog': this run has clean, gaussian, jpeg"):
        opened.conditions("fog")
    with pytest.raises(ValueError, match="keep '5': this run has 4, 8"):
        opened.methods("5")


def test_disagreements_are_those_of_the_records(opened: OpenRun) -> None:
    first, second = index(opened, "ClustRS"), index(opened, "FasterVLM")
    condition = opened.conditions("gaussian")[1]
    records: list[Row] = [json.loads(line) for line in (opened.folder / "answers.jsonl").read_text().splitlines()]
    under = [r for r in records if r["corruption"] == "gaussian:0.5" and r["method"]["keep"] == 4]
    mine = {r["item"]: r for r in under if r["method"]["name"] == "clustrs"}
    theirs = {r["item"]: r for r in under if r["method"]["name"] == "fastervlm"}
    expected = {item for item in mine if mine[item]["score"] != theirs[item]["score"]}
    found = disagreements(opened, first, second, condition)
    assert {one.asked.item for one in found} == expected
    assert 0 < len(expected) < 12 + 1
    for one in found:
        assert (one.first.text, one.first.score) == (mine[one.asked.item]["text"], mine[one.asked.item]["score"])
        assert (one.second.text, one.second.score) == (theirs[one.asked.item]["text"], theirs[one.asked.item]["score"])
        assert list(one.first.kept) == mine[one.asked.item]["kept"]
    gains = [one.first.score - one.second.score for one in found]
    assert gains == sorted(gains, reverse=True)


def test_failed_and_missing_answers_are_no_disagreements(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> list[Row]:
        ours = [r for r in rows if r["method"]["name"] == "clustrs"]
        ours[0].update(text=None, score=None, kept=None, error="broken")
        return [row for row in rows if row is not ours[1]]

    write_run(tmp_path / "run", change)
    opened = RunLibrary(tmp_path).open("run")
    found = clean_disagreements(opened)
    assert {"v1_0", "v1_1"}.isdisjoint(one.asked.item for one in found)
    assert found


def test_clustrs_is_the_first_rival_and_has_one_itself(opened: OpenRun) -> None:
    ours, theirs, whole = (index(opened, name) for name in ("ClustRS", "FasterVLM", "unpruned"))
    assert opened.rival("4", theirs) == opened.rival("4", whole) == ours
    assert opened.rival("4", ours) == theirs


def test_table_has_a_button_for_every_cell_and_marks_the_chosen_one(opened: OpenRun) -> None:
    condition = opened.conditions("jpeg")[1]
    page = markup.cells(opened, "jpeg", "4", (index(opened, "ClustRS"), condition))
    assert page.count("<button") == 3 * 3
    assert page.count('aria-pressed="true"') == 1
    mean = opened.summary.estimates[index(opened, "ClustRS")][condition].mean
    assert mean is not None
    assert f">{100 * mean:.1f}<" in page


def test_answers_are_escaped(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"

    def change(rows: list[Row]) -> list[Row]:
        return [{**row, "text": evil + str(row["score"]), "question": evil, "answer": evil} for row in rows]

    write_run(tmp_path / "run", change)
    opened = RunLibrary(tmp_path).open("run")
    found = clean_disagreements(opened)
    page = markup.disagreement_list(found, "clustrs", "unpruned", "clean")
    page += markup.disagreement(found[0], [None, None], "")
    assert "<img" not in page
    assert "&lt;img" in page


def test_chart_puts_better_scores_higher_and_names_every_point(opened: OpenRun) -> None:
    figure = figures(opened.summary)[0]
    for curve in (curve for _, curves in figure.panels for curve in curves):
        means = [point.mean for point in curve.points]
        heights = [float(place.split()[1]) for place in figure.line(curve).removeprefix("M").split("L")]
        assert np.argsort(means).tolist() == np.argsort(-np.array(heights)).tolist()
    shown = markup.curves(opened, "gaussian", "4")
    assert shown.count('<div class="panel"><svg') == 1
    assert shown.count("<title>") == 3 * 3, "a number for each point of three methods"
    assert all(shown.count(f"<title>{label}: ") == 3 for label in ("ClustRS", "FasterVLM", "unpruned"))
    assert 'style="color: currentColor"' in shown, "the unpruned model has the color of the page's text"


def test_markers_are_those_of_the_palette() -> None:
    paths = {name: marker_path(name) for name in (*MARKERS.values(), *OTHER_MARKERS)}
    assert len(set(paths.values())) == len(paths)
    assert all(path.endswith("Z") for name, path in paths.items() if name != "x")
    assert paths["x"].count("M") == 2


@pytest.mark.slow
def test_kept_tokens_of_a_run_are_lit_where_they_lie(loaded: LoadedModel, library_folder: Path) -> None:
    opened = RunLibrary(library_folder).open("scenes-run")
    one = clean_disagreements(opened)[0]
    pictures, note = kept_images(loaded, opened, one)
    assert note == ""
    pruned, whole = pictures
    assert pruned is not None
    assert whole is not None
    lit, plain = (np.asarray(p.resize((240, 240))).astype(int).sum(-1) for p in (pruned, whole))
    cells = {(i // 24, i % 24) for i in one.first.kept if i >= 0}
    dropped = [(y, x) for y in range(24) for x in range(24) if (y, x) not in cells]
    bright = [lit[10 * y + 5, 10 * x + 5] / max(1, plain[10 * y + 5, 10 * x + 5]) for y, x in cells]
    dim = [lit[10 * y + 5, 10 * x + 5] / max(1, plain[10 * y + 5, 10 * x + 5]) for y, x in dropped]
    assert min(bright) > max(np.quantile(dim, 0.9), 0.8)


@pytest.mark.slow
def test_without_the_model_of_the_run_the_image_is_shown_alone(
    loaded: LoadedModel, library_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(library_folder / "scenes-run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "model": "another/model"}))
    opened = RunLibrary(tmp_path).open("run")
    one = clean_disagreements(opened)[0]
    pictures, note = kept_images(loaded, opened, one)
    assert note == "The run's model is another/model: start clustrs app --model another/model to see the kept tokens."
    assert pictures[0] is pictures[1]


def test_data_of_the_hub_is_not_fetched(loaded: LoadedModel, tmp_path: Path) -> None:
    write_run(tmp_path / "run", task="scienceqa")
    opened = RunLibrary(tmp_path).open("run")
    one = clean_disagreements(opened)[0]
    with pytest.raises(ValueError, match="scienceqa came from the hub, and this page makes no requests"):
        kept_images(loaded, opened, one)
