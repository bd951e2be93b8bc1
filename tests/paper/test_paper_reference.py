"""The paper's numbers in the report: those of the table that the run reproduces, and the same as in the studies."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from recorded_run import write_run

from clustrs.cli.base import parse
from clustrs.cli.evaluate import configuration
from clustrs.evaluation.report import write_report
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import load_run
from clustrs_paper.studies import ablation, sensitivity
from clustrs_paper.studies.grids import Grid
from clustrs_paper.tables import paper_table

PROPOSED: dict[str, Any] = {"tau": 1.0, "clip": [0.1, 0.95], "distance": "huber", "shrink": True}


def run_of(folder: Path, name: str, **settings: Any) -> Path:
    """A run with made-up answers of a ready configuration of the paper."""
    config = configuration(parse(["eval", "--config", f"paper/{name}"])).to_json()
    return write_run(folder, **{**config, "judged": False, "scale": 1.0, "items": 3, **settings})


def report_of(folder: Path) -> list[dict[str, str]]:
    write_report(folder)
    with (folder / "report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table_after(folder: Path, title: str) -> list[list[str]]:
    """The cells of a table of report.md, without its header."""
    _, found, rest = (folder / "report.md").read_text().partition(f"**{title}**\n\n")
    assert found, f"there is no table {title!r}"
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def printed(text: str) -> str:
    return re.findall(r"\(paper (.*?)\)", text)[0].replace("\\", "")


@pytest.mark.parametrize(("name", "count"), [("ablation", 36), ("sensitivity-tau", 60), ("sensitivity-clip", 72)])
@pytest.mark.parametrize("reproduces", ["named", None])
def test_all_cells_are_from_the_reproduced_table(tmp_path: Path, name: str, count: int, reproduces: str | None) -> None:
    table = name.replace("-", "_")
    folder = run_of(tmp_path, name, reproduces=table if reproduces else None)
    shown = {}
    for row in report_of(folder):
        if row["paper"]:
            stored = json.loads(row["parameters"])
            changed = {key: stored[key] for key, default in PROPOSED.items() if stored[key] != default}
            shown[str(changed), row["keep"], row["corruption"], row["level"]] = float(row["paper"])
    assert len(shown) == count
    assert shown == {
        (
            str({key: cell.parameters[key] for key in PROPOSED if key in cell.parameters}),
            str(cell.keep),
            cell.corruption,
            "" if cell.level is None else f"{cell.level:g}",
        ): cell.value
        for cell in paper_table(table)
        if cell.metric == "score"
    }
    text = (folder / "report.md").read_text()
    assert f"prints for llava-1.5-7b in its table {table.replace('_', ' ')} and no other." in text


def test_the_gain_of_rrs_is_the_papers(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "ablation")
    rows = report_of(folder)
    gains = table_after(folder, "Gain of RRS: ClustRS minus C+H")
    cells = [cell for cell in paper_table("ablation") if cell.metric == "gain"]
    assert [row[:2] for row in gains] == [[str(cell.keep), f"gaussian:{cell.level:g}"] for cell in cells]
    assert [float(printed(row[2])) for row in gains] == [cell.value for cell in cells]
    assert gains[1][2].endswith("(paper +0.027)")
    means = {
        (row["keep"], row["level"], '"shrink": true' in row["parameters"]): float(row["mean"])
        for row in rows
        if row["method"].startswith("clustrs") and '"huber"' in row["parameters"]
    }
    for row, cell in zip(gains, cells, strict=True):
        key = (str(cell.keep), f"{cell.level:g}")
        ours = float(re.findall(r"[-+]?\d\.\d+", row[2])[0])
        assert ours == pytest.approx(means[*key, True] - means[*key, False], abs=0.0006)


@pytest.mark.parametrize("name", ["sensitivity-tau", "sensitivity-clip"])
def test_the_mean_row_is_the_papers(tmp_path: Path, name: str) -> None:
    folder = run_of(tmp_path, name)
    rows = report_of(folder)
    (mean,) = table_after(folder, "Mean over budgets and conditions")
    cells = [cell for cell in paper_table(name.replace("-", "_")) if cell.corruption == "all"]
    assert [float(printed(text)) for text in mean[1:]] == [cell.value for cell in cells]
    first = [float(row["mean"]) for row in rows if row["method"] == rows[0]["method"]]
    assert len(first) == 12
    assert float(mean[1].split()[0].strip("*")) == pytest.approx(sum(first) / 12, abs=0.0006)


def test_a_mean_over_other_cells_is_not_compared(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "sensitivity-tau", corruptions=["clean", "gaussian:0.5"])
    write_report(folder)
    assert "Mean over budgets and conditions" not in (folder / "report.md").read_text()


@pytest.mark.parametrize("study", ["ablation", "tau", "clip"])
def test_studies_and_report_agree(tmp_path: Path, study: Any) -> None:
    table = study if study == "ablation" else f"sensitivity_{study}"
    variants = ablation.VARIANTS if study == "ablation" else sensitivity.VALUES[study]
    keeps = (16, 50, 144)
    full = configuration(parse(["eval", "--config", f"paper/{table.replace('_', '-')}"])).to_json()
    methods = [method for method in full["methods"] if method["name"] != "none"]
    run = load_run(run_of(tmp_path, table.replace("_", "-"), methods=methods))
    grid = Grid(run, tuple(variants.values()), keeps, run.scores.reshape(len(variants), 3, *run.scores.shape[1:]))
    summary = Summary(run)
    for number in range(len(variants)):
        for cell, value in zip(grid.cells, grid.paper(table, number), strict=True):
            if cell.condition is not None and cell.keep is not None:
                method = number * len(keeps) + keeps.index(int(cell.keep))
                assert value == summary.paper_score(method, cell.condition.name, cell.condition.level)
                assert value is not None
        if study != "ablation":
            mean = [cell.value for cell in paper_table(table) if cell.corruption == "all"][number]
            assert grid.paper(table, number)[-1] == mean


def test_the_ablation_study_has_the_papers_gain_column(tmp_path: Path) -> None:
    full = configuration(parse(["eval", "--config", "paper/ablation"])).to_json()
    run = load_run(run_of(tmp_path, "ablation", methods=full["methods"][1:]))
    scores = run.scores.reshape(3, 3, *run.scores.shape[1:])
    rows = ablation.table(Grid(run, tuple(ablation.VARIANTS.values()), (16, 50, 144), scores))
    gains = [row["paper_gain_rrs"] for row in rows if row["corruption"] != "mean"]
    assert gains == [cell.value for cell in paper_table("ablation") if cell.metric == "gain"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"prompt_template": "vicuna_v1", "image_padding": "square"},
            "Prompt: LLaVA-1.5's template vicuna_v1 with its system line. "
            "Images: padded to a square with the mean color.",
        ),
        (
            {"prompt_template": "checkpoint", "image_padding": "checkpoint"},
            "Prompt: the checkpoint's own chat template. Images: fitted as the checkpoint's processor does.",
        ),
        ({}, "Prompt: unknown. Images: fitted in an unknown way."),
    ],
)
def test_the_report_says_what_was_sent(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    folder = write_run(tmp_path, **settings)
    write_report(folder)
    assert sentence in (folder / "report.md").read_text().replace("\\", "")


@pytest.mark.parametrize("name", ["ablation", "mmvet-gaussian", "scienceqa-salt-pepper", "onevision-gaussian"])
def test_ready_configurations_have_the_protocol_of_their_model(name: str) -> None:
    config = configuration(parse(["eval", "--config", f"paper/{name}"]))
    llava = "onevision" not in name
    assert config.prompt_template == ("vicuna_v1" if llava else "checkpoint")
    assert config.image_padding == ("square" if llava else "checkpoint")
    other = configuration(parse(["eval", "--config", f"paper/{name}", "--image-padding", "checkpoint"]))
    assert other.image_padding == "checkpoint"
