"""The study of the measures of `clustrs tune`, and its table in the docs."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper import grid_task
from paper.study_command import parts
from tiny_models import make_image

from clustrs import ClusterMeans, DivPrune, PruningConfig
from clustrs_paper.evidence.__main__ import TUNE_PAGE, TUNING
from clustrs_paper.evidence.page import MODELS, filled
from clustrs_paper.studies import tuning


def slow_ranks(values: Any) -> list[float]:
    return [1 + sum(v < own for v in values) + (sum(v == own for v in values) - 1) / 2 for own in values]


def test_rank_correlation() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        first, second = random.integers(0, 6, (2, 15)).astype(float)
        left, right = np.array(slow_ranks(first)), np.array(slow_ranks(second))
        left, right = left - left.mean(), right - right.mean()
        expected = (left * right).sum() / np.sqrt((left**2).sum() * (right**2).sum())
        assert tuning.ranks(first).tolist() == slow_ranks(first)
        assert tuning.spearman(first, second) == pytest.approx(expected)
    assert np.isnan(tuning.spearman(np.ones(4), np.arange(4.0)))


def made_up(accuracy: Any, **measures: Any) -> tuning.Measurements:
    """Four candidates, two at each of two budgets, on four images with a question each."""
    configs = [PruningConfig(method=method(keep=keep)) for keep in (8, 3) for method in (ClusterMeans, DivPrune)]
    sums = {name: np.zeros((4, 4)) for name in tuning.MEASURES} | {"accuracy": np.array(accuracy, dtype=float)}
    return tuning.Measurements(
        configs, {**sums, **{k: np.array(v, dtype=float) for k, v in measures.items()}}, np.ones(4)
    )


def test_losses_and_correlations_of_made_up_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "DRAWS", 100)
    accuracy = [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]]  # images 0 and 2 pick, 1 and 3 report
    found = made_up(accuracy, agreement=accuracy, kl=1 - np.array(accuracy), tokens=1 - np.array(accuracy))
    rows = {row["measure"]: row for row in tuning.compare(found, "made up")}
    assert (rows["agreement"]["rho"], rows["kl"]["rho"], rows["tokens"]["rho"]) == (1, 1, -1)
    assert (rows["agreement"]["images"], rows["agreement"]["questions"]) == (2, 2)
    assert rows["agreement"]["rho_within_budget"] == 1
    # On images 0 and 2 candidates 1 and 2 are best; on 1 and 3 candidates 1 and 3, with 1 and 0.5 right.
    for name in ("agreement", "kl", "accuracy"):
        assert (rows[name]["accuracy"], rows[name]["below_best"], rows[name]["below_labels"]) == (0.5, 0.25, 0)
    assert (rows["tokens"]["accuracy"], rows["tokens"]["below_labels"]) == (0.5, 0)
    assert (rows["any candidate"]["accuracy"], rows["clustermeans"]["accuracy"]) == (0.5, 0.25)
    assert (rows["clustermeans"]["below_labels"], rows["clustermeans"]["below_best"]) == (0.25, 0.5)


def test_the_study(folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_task.short_answers(monkeypatch)
    monkeypatch.setattr(tuning, "DRAWS", 20)
    data = tmp_path / "data"
    data.mkdir()
    rows = [(f"{i}.png", f"Why {q}?") for i in range(5) for q in range(3)]
    for i in range(5):
        make_image(40, 50, i).save(data / f"{i}.png")
    lines = [json.dumps({"id": f"{i}", "image": a, "question": q, "answer": "x"}) for i, (a, q) in enumerate(rows)]
    (data / "questions.jsonl").write_text("\n".join(lines))
    words = ("--task", "custom", "--data", data, "--methods", "divprune", "clustermeans", "--keep", 8, 3)
    model, output = folder_of("llava", "clip"), ("--output", tmp_path / "out")
    measures, candidates = parts(tuning, model, *words, *output, "--limit", 8)
    records = [json.loads(line) for line in (tmp_path / "out" / "run" / "tune.jsonl").read_text().splitlines()]
    assert len({one["image"] for one in records}) == 4
    assert len(records) == 4 * 2 * (1 + 2 * 2 * 2)  # images, questions, and candidates with the unpruned model
    whole = {"method": "divprune", "keep": 3, "positions": "compact"}
    own = [row for row in candidates.rows if whole.items() <= row.items()]
    assert [row["half"] for row in own] == ["picking", "reporting"]
    stored = [one["values"] for one in records if '"divprune"' in one["candidate"] and '"compact"' in one["candidate"]]
    stored = [one for one in stored if one["visual_tokens"] == 3]
    for name in tuning.MEASURES:
        expected = np.mean([one[name] for one in stored])
        assert np.mean([row[name] for row in own]) == pytest.approx(expected, abs=1e-4)
    assert "Picked on one half of the images: " in measures.findings
    parts(tuning, model, *words, *output, "--limit", 10)
    again = (tmp_path / "out" / "run" / "tune.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in again[: len(records)]] == records  # a larger limit adds to what is there
    assert len(again) == len(records) * 5 // 4
    with pytest.raises(ValueError, match="about four images or more, got 2"):
        parts(tuning, model, *words, *output, "--limit", 3)


def test_table_in_the_docs_is_that_of_the_stored_numbers() -> None:
    rows: list[dict[str, str]] = []
    stored = [model for model in MODELS if (TUNING / f"{model}-tuning.csv").exists()]
    assert {"mini-llava", "mini-onevision", "photo-llava"} <= {*stored}
    for model in stored:
        with (TUNING / f"{model}-tuning.csv").open() as file:
            rows += csv.DictReader(file)
        with (TUNING / f"{model}-candidates.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 2 * 72
    text = TUNE_PAGE.read_text()
    assert filled(text, tuning.block(rows), "tuning") == text
