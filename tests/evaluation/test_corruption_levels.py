"""Levels that are chosen by what they cost the unpruned model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evaluation.run_files as files
import numpy as np
import pytest
from msgspec.structs import replace

from clustrs.cli.base import parse
from clustrs.cli.evaluate import configuration
from clustrs.corruptions import Corruption, list_corruptions
from clustrs.embedded import DEFAULT
from clustrs.evaluation import levels, metrics
from clustrs.evaluation.config import Config
from clustrs.evaluation.levels import Curve, Rung, ladder, measure_curves, parse_loss, round_level
from clustrs.evaluation.results import load_run


def curve(corruption: str, losses: Mapping[float, float]) -> Curve:
    rungs = [Rung(level, 100, 1 - loss, 0, 1, loss, loss, loss) for level, loss in losses.items()]
    return Curve(corruption, 1.0, tuple(rungs))


def test_a_level_is_on_the_line_between_two_rungs() -> None:
    made = curve("gaussian", {0.1: 0.05, 0.2: 0.25, 0.4: 0.45})
    assert made.level_at(0.15) == 0.15
    assert made.level_at(0.35) == 0.3
    assert made.level_at(0.25) == 0.2


def test_before_the_first_rung_there_are_clean_images() -> None:
    assert curve("gaussian", {0.1: 0.2}).level_at(0.1) == 0.05
    assert curve("brightness", {0.5: 0.2}).level_at(0.1) == 0.75
    assert curve("jpeg", {60: 0.2}).level_at(0.1) == 80


def test_a_loss_that_is_never_reached_has_no_level() -> None:
    made = curve("salt_pepper", {0.1: 0.1, 0.5: 0.3})
    assert made.level_at(0.31) is None
    assert made.largest_loss == 0.3


def test_what_a_worse_image_seems_to_gain_does_not_count() -> None:
    """From 0.1 on 20 % are lost, whatever was measured at 0.2: half of the way to 40 % is half of the way to 0.3."""
    made = curve("gaussian", {0.1: 0.2, 0.2: 0.1, 0.3: 0.4})
    assert made.level_at(0.3) == 0.25
    assert made.level_at(0.2) == 0.1


@pytest.mark.parametrize(
    ("name", "level", "rounded"),
    [
        ("gaussian", 0.23456, 0.23),
        ("gaussian", 1.2345, 1.2),
        ("salt_pepper", 0.0991, 0.1),
        ("salt_pepper", 0.01234, 0.012),
        ("jpeg", 33.4, 33),
        ("motion_blur", 15.9, 15),
    ],
)
def test_rounding(name: str, level: float, rounded: float) -> None:
    assert round_level(name, level) == rounded
    Corruption(name, round_level(name, level))


def test_every_corruption_has_a_ladder_of_levels_that_it_takes() -> None:
    for name in list_corruptions():
        rungs = ladder(name)
        assert len(rungs) >= 2
        assert all(Corruption(name, level).level == level for level in rungs)
        steps = np.diff([levels.HARMLESS.get(name, 0.0), *rungs])
        assert (steps > 0).all() or (steps < 0).all()


@pytest.mark.parametrize(
    "text", ["gaussian@10", "gaussian@0%", "gaussian@100%", "@10%", "gaussian@ten%", "gaussian:1@5%"]
)
def test_mistakes_in_a_loss(text: str) -> None:
    with pytest.raises(ValueError, match=r"corruption must be NAME@LOSS% with 0 < loss < 100"):
        parse_loss(text)


def test_an_unknown_corruption_is_named() -> None:
    with pytest.raises(ValueError, match="unknown corruption 'gausian'"):
        parse_loss("gausian@10%")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.build(tmp_path_factory.mktemp("levels"))


def right_sometimes(patch: pytest.MonkeyPatch) -> None:
    """Scores that fall with the level: of 8 questions all are right on clean images, 6 at 0.5 and 2 at 2."""
    from clustrs.evaluation.runner import Worker

    answered = Worker.run

    def run(self: Worker, unit: Any) -> Any:
        right = {"clean": 8, "gaussian:0.5": 6, "gaussian:2": 2}[unit.corruption]
        order = [item.id for item in self.task.items]
        for records in answered(self, unit):
            yield [replace(record, score=float(order.index(record.item) < right)) for record in records]

    patch.setattr(Worker, "run", run)


def test_a_measured_curve(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right_sometimes(monkeypatch)
    config = files.config(root, seeds=(3, 4), limit=None)
    curves = measure_curves(config, {"gaussian": (0.5, 2.0)}, tmp_path / "curve", progress=False)
    (made,) = curves.values()
    assert made.clean == 1.0
    assert [(rung.level, rung.n, rung.score, rung.loss) for rung in made.rungs] == [
        (0.5, 8, 0.75, 0.25),
        (2, 8, 0.25, 0.75),
    ]
    assert made.level_at(0.5) == 1.2
    run = load_run(tmp_path / "curve")
    assert [method.name for method in run.methods] == ["none"]
    assert run.seeds == (3,)
    clean, mild = run.scores[0, 0], run.scores[0, 1]
    (expected,) = metrics.differences(clean[None], mild[None])
    assert (made.rungs[0].loss_low, made.rungs[0].loss_high) == (expected.low, expected.high)
    monkeypatch.setattr("clustrs.models.load.load_model", lambda *_: pytest.fail("nothing is left to do"))
    assert measure_curves(config, {"gaussian": (0.5, 2.0)}, tmp_path / "curve", progress=False) == curves


def test_so_many_questions_are_asked(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right_sometimes(monkeypatch)
    (made,) = measure_curves(files.config(root), {"gaussian": (0.5,)}, tmp_path, 4, progress=False).values()
    assert made.rungs[0].n == 4


def test_a_model_that_knows_nothing_has_nothing_to_lose(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of 8 questions of the task 'custom' right on clean images"):
        measure_curves(files.config(root), {"gaussian": (0.5,)}, tmp_path, progress=False)


def test_a_task_with_a_judge_has_no_curve(root: Path, tmp_path: Path) -> None:
    config = files.config(root, task_options={"scoring": "judged"})
    with pytest.raises(ValueError, match=r"task 'custom' needs a judge to score its answers"):
        measure_curves(config, {"gaussian": (0.5,)}, tmp_path, progress=False)


def test_the_command_line_takes_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measured(
        config: Config, ladders: Mapping[str, Sequence[float]], folder: Path, progress: bool = True
    ) -> dict[str, Curve]:
        asked.append((config.model, dict(ladders), folder))
        return {name: curve(name, {0.1: 0.2, 0.3: 0.6}) for name in ladders}

    monkeypatch.setattr(levels, "measure_curves", measured)
    words = ["eval", "--corrupt", "gaussian@10%", "clean", "salt_pepper@40%", "jpeg", "--output", str(tmp_path / "o")]
    config = configuration(parse(words))
    assert config.corruptions == ("gaussian:0.05", "clean", "salt_pepper:0.2", "jpeg:60", "jpeg:30")
    ladders = {name: ladder(name) for name in ("gaussian", "salt_pepper")}
    assert asked == [(DEFAULT, ladders, tmp_path / "o" / "curve")]
    assert "gaussian@10% is gaussian:0.05\n" in capsys.readouterr().err
    json.dumps(config.to_json())
    with pytest.raises(ValueError, match=f"gaussian@70%: {DEFAULT} loses at most 60.0%"):
        configuration(parse(["eval", "--corrupt", "gaussian@70%", "--output", str(tmp_path / "o")]))
    with pytest.raises(ValueError, match="must be NAME@LOSS%"):
        configuration(parse(["eval", "--corrupt", "gaussian@7"]))
