"""Levels from the unpruned model's curve: the study of them, and the studies that use them."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from paper import grid_task
from paper.study_command import parts

from clustrs.evaluation import levels as evaluation_levels
from clustrs.evaluation.config import Config
from clustrs.evaluation.levels import Curve, Rung
from clustrs_paper.studies import ablation, curves, denoising, levels, sensitivity, stability

Folders = Callable[[str, str], Path]
LOSSES = {"gaussian": {0.2: 0.2, 0.4: 0.5}, "salt_pepper": {0.1: 0.2, 0.5: 0.3}}


def made_up(name: str) -> Curve:
    rungs = [Rung(level, 50, 0.8 * (1 - loss), 0, 1, loss, loss, loss) for level, loss in LOSSES[name].items()]
    return Curve(name, 0.8, tuple(rungs))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Path, int]]:
    """Curves without a measurement; the list fills with what was asked for."""
    asked: list[tuple[Config, Path, int]] = []

    def measure(
        config: Config, ladders: Mapping[str, Sequence[float]], folder: Path, questions: int, progress: bool
    ) -> dict[str, Curve]:
        asked.append((config, folder, questions))
        return {name: made_up(name) for name in ladders}

    monkeypatch.setattr(evaluation_levels, "measure_curves", measure)
    return asked


def test_the_study(folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_task.short_answers(monkeypatch)
    words = ("--corrupt", "gaussian", "--levels", 0.5, 2, "--losses", 0.001, 0.999)
    part = grid_task.run(levels, folder_of("llava", "clip"), data, tmp_path, *words)
    scores: dict[str, dict[str, float]] = {}
    for answer in grid_task.answers(tmp_path):
        assert answer["method"]["name"] == "none"
        if answer["error"] is None:
            scores.setdefault(answer["corruption"], {})[answer["item"]] = answer["score"]
    clean = grid_task.mean(scores["clean"])
    first, second, *chosen = part.rows
    for row, condition in ((first, "gaussian:0.5"), (second, "gaussian:2")):
        assert (row["n"], row["chosen"], row["clean"]) == (6, False, pytest.approx(clean))
        assert row["score"] == pytest.approx(grid_task.mean(scores[condition]))
        assert row["loss"] == pytest.approx(1 - row["score"] / clean)
        assert row["loss_low"] <= row["loss"] <= row["loss_high"]
    assert [(row["chosen"], row["loss"]) for row in chosen] == [(True, 0.001), (True, 0.999)]
    assert chosen[1]["level"] is None
    assert "never 100%" in part.findings
    with part.save(tmp_path / "files")[2].open(newline="") as file:
        assert [row["level"] for row in csv.DictReader(file)][:2] == ["0.5", "2.0"]


def test_a_ladder_is_for_one_corruption(tmp_path: Path) -> None:
    config = levels.LevelsConfig(folder=tmp_path, levels=(0.1,))
    with pytest.raises(ValueError, match=r"levels must be given for one corruption only, got 2 corruptions"):
        levels.run(config)


def test_the_text_says_what_is_never_lost() -> None:
    text = curves.curve_text(made_up("salt_pepper"), (0.1, 0.35), "mini")
    assert text == (
        "Under salt_pepper the unpruned mini loses of its clean score (0.800, 50 questions) 10% at 0.05, never 35% (at "
        "most 30%, up to level 0.5)."
    )


@pytest.mark.parametrize("loss", [0.0, 1.0, 10.0, math.nan])
def test_a_loss_is_a_share(loss: float) -> None:
    with pytest.raises(ValueError, match=r"losses must be shares of the clean score between 0 and 1, got "):
        curves.requested_losses((loss,), other_levels=False)


def test_default_losses() -> None:
    assert curves.requested_losses(None, other_levels=False) == (0.1, 0.35)
    assert curves.requested_losses(None, other_levels=True) == ()
    assert curves.requested_losses((0.2,), other_levels=True) == (0.2,)


def test_the_ablation_has_a_part_of_its_own_for_them(
    folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Any]
) -> None:
    grid_task.short_answers(monkeypatch)
    words = ("--keep", 4, "--levels", 3, "--losses", 0.1, 0.35, "--curve-questions", 7)
    given = ("--output", tmp_path, "--task", "custom", "--data", data, *words)
    paper, chosen = parts(ablation, folder_of("llava", "clip"), *given)
    assert (paper.name, chosen.name) == ("ablation", "ablation-chosen")
    assert [row["level"] for row in paper.rows] == [3.0]
    assert [row["level"] for row in chosen.rows] == [0.1, 0.3, None]
    assert "10% at 0.1, 35% at 0.3" in chosen.findings
    assert "10%" not in paper.findings
    ((config, folder, questions),) = measured
    assert (config.task, folder, questions) == ("custom", tmp_path / "run" / "curve", 7)
    assert (tmp_path / "run" / "chosen" / "answers.jsonl").exists()


def test_so_has_the_sensitivity(
    folder_of: Folders, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Any]
) -> None:
    grid_task.short_answers(monkeypatch)
    words = ("--keep", 4, "--corrupt", "clean", "--losses", 0.1, 0.35, "--parameters", "centroid")
    given = ("--output", tmp_path, "--task", "custom", "--data", data, *words)
    paper, chosen = parts(sensitivity, folder_of("llava", "clip"), *given)
    assert (paper.name, chosen.name) == ("sensitivity", "sensitivity-chosen")
    found = {(row["corruption"], row["level"]) for row in chosen.rows if row["corruption"] != "mean"}
    assert found == {("clean", None), ("gaussian", 0.1), ("gaussian", 0.3), ("salt_pepper", 0.05)}
    assert "never 35%" in chosen.findings


@pytest.mark.parametrize(("study", "before"), [(stability, ["0"]), (denoising, [None])])
def test_studies_of_images_add_them_to_the_paper_s(
    study: Any, before: list[Any], folder_of: Folders, data: Path, tmp_path: Path, measured: list[Any]
) -> None:
    words = ("--task", "custom", "--data", data, "--count", 2, "--keep", 4, "--output", tmp_path)
    (part,) = parts(study, folder_of("llava", "clip"), *words)
    found = [row["level"] for row in part.rows if row.get("measure") in (None, "rank_change")]
    assert [*map(str, found)] == [*map(str, before), *(f"{x}" for x in expected_levels(study))]
    assert "10% at 0.1, 35% at 0.3" in part.findings
    assert {row["images"] for row in part.rows} == {2}
    ((_, folder, questions),) = measured
    assert (folder, questions) == (tmp_path / "run" / "curve", 200)


def expected_levels(study: Any) -> list[Any]:
    """The paper's levels and 0.3, from mild to severe, as the study's table has them; 0.1 is one of the paper's."""
    if study is stability:
        return ["0.1", "0.3", "0.5", "1", "2", "3"]
    return [0.1, 0.3, 0.5, 1.0, 2.0, 3.0]


def test_images_of_one_s_own_are_measured_at_the_paper_s_levels(
    folder_of: Folders, images: list[Path], measured: list[Any]
) -> None:
    (part,) = parts(denoising, folder_of("llava", "clip"), *images, "--keep", 4)
    assert [row["level"] for row in part.rows] == [None, 0.1, 0.5, 1.0, 2.0, 3.0]
    assert not measured


def test_a_task_with_a_judge_has_no_such_levels(
    folder_of: Folders, data: Path, tmp_path: Path, measured: list[Any]
) -> None:
    config = ablation.AblationConfig(
        folder=tmp_path,
        model=str(folder_of("llava", "clip")),
        task="custom",
        data=str(data),
        task_options={"scoring": "judged"},
    )
    chosen = curves.choose_levels(config, ["gaussian"], (0.1,), 5, tmp_path)
    assert chosen.levels == {"gaussian": ()}
    assert chosen.text == "No levels from the model's own curve: a judge has to score custom."
    assert not measured


def test_images_of_a_task(data: Path) -> None:
    from clustrs_paper.studies.images import task_images

    assert [image.name for image in task_images("scenes", None, 3)] == ["scene-0000", "scene-0001", "scene-0002"]
    assert [image.name for image in task_images("custom", str(data), 2)] == ["0.png", "1.png"]
    (photo,) = task_images("photos", None, 1)
    assert photo.image.size == (336, 336)
