"""The stored leaderboard and the pages made of it."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import recorded_run

from clustrs.cli.base import parse
from clustrs.evaluation.report.leaderboard import read_entries
from clustrs_paper.evidence import leaderboard, place_and_weight
from clustrs_paper.evidence.page import filled

BOTH = {"positions": "original", "attention": "proportional"}


def test_stored_entries_are_those_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def right_or_wrong(rows: list[recorded_run.Row]) -> list[recorded_run.Row]:
        return [{**row, "score": float(row["score"] >= 0.5)} for row in rows]

    folders = [
        recorded_run.write_run(tmp_path / "published", right_or_wrong, positions="compact", attention="plain"),
        recorded_run.write_run(tmp_path / "both", right_or_wrong, **BOTH),
    ]
    entries = read_entries(folders)
    leaderboard.store(entries, tmp_path)
    monkeypatch.setattr(leaderboard, "MODELS", ("mini-llava",))
    again = leaderboard.load(tmp_path)
    assert len(again) == len(entries) == 1 + 2 * 4
    for before, after in zip(entries, again, strict=True):
        for name in ("model", "task", "method", "keep", "setting", "conditions", "costs", "machine"):
            assert getattr(before, name) == getattr(after, name)
        assert np.array_equal(before.scores, after.scores)
        assert np.array_equal(before.unpruned, after.unpruned)
    with pytest.raises(ValueError, match="must be 0 or 1 to be stored"):
        leaderboard.store(read_entries([recorded_run.write_run(tmp_path / "graded")]), tmp_path)


def test_costs_of_short_runs_are_joined_to_stored_answers(tmp_path: Path) -> None:
    entries = read_entries([recorded_run.write_run(tmp_path / "run", positions="compact", attention="plain")])
    timed = [replace(one, costs={"tokens": 1.0, "prefill": float(i)}, machine="m") for i, one in enumerate(entries)]
    joined = leaderboard.with_costs(entries, [one for one in timed if one.method != "random"])
    for i, (before, after) in enumerate(zip(entries, joined, strict=True)):
        added = {} if before.method == "random" else {"prefill": float(i)}
        assert after == replace(before, costs={**before.costs, **added}, machine="m" if added else "")


def test_the_pages_are_those_of_the_stored_runs() -> None:
    entries = leaderboard.load()
    assert {entry.model for entry in entries} == {*leaderboard.MODELS}
    text = leaderboard.PAGE.read_text(encoding="utf-8")
    assert text == filled(text, leaderboard.block(entries), "leaderboard")
    for path, page in leaderboard.pages(entries).items():
        assert path.read_text(encoding="utf-8") == page, path


def test_the_numbers_in_the_docs_are_those_of_the_stored_runs() -> None:
    """Read without the code that writes them: shares by budget are means over models and conditions."""
    scores: dict[tuple[str, ...], float] = {}
    for model in leaderboard.MODELS:
        with (leaderboard.STORED / f"{model}.csv").open() as file:
            for row in csv.DictReader(file):
                key = (model, row["method"], row["setting"], row["keep"], f"{row['corruption']}:{row['level']}")
                scores[key] = bin(int(row["right"], 16)).count("1") / int(row["questions"])

    def mean(method: str, setting: str, keep: str) -> float:
        shares = [
            score / next(s for k, s in scores.items() if (k[0], k[1], k[4]) == (model, "none", condition))
            for (model, *own, condition), score in scores.items()
            if own == [method, setting, keep]
        ]
        assert len(shares) == 3 * len(leaderboard.MODELS)
        return 100 * fmean(shares)

    text = leaderboard.PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\S+) \| (as published|place and weight) \| (.+) \|$", text, re.M)
    settings = {key[1:3] for key in scores if key[1] != "none"}
    assert sorted(method for method, *_ in shown) == sorted({method for method, _ in settings})
    for method, setting, cells in shown:
        first, second, *budgets = cells.split(" | ")
        assert budgets[:3] == [f"{mean(method, setting, keep):.1f}" for keep in ("16", "64", "144")]
        means = {s: fmean(mean(method, s, keep) for keep in ("16", "64", "144")) for m, s in settings if m == method}
        assert setting == max(means, key=means.__getitem__)
        assert first.split(" ")[0] == f"{means.pop(setting):.1f}"
        assert second == (f"{means.popitem()[1]:.1f}" if means else "\N{EN DASH}")


@pytest.mark.parametrize("model", leaderboard.MODELS)
@pytest.mark.parametrize("setting", [place_and_weight.PUBLISHED, place_and_weight.BOTH])
def test_the_commands_are_those_of_the_command_line(model: str, setting: str) -> None:
    given = parse(["eval", *leaderboard.eval_options(model, setting, 72)])
    assert (given["positions"], given["attention"]) == place_and_weight.SETTINGS[setting]
    assert given["limit"] == 72
    assert len(given["corrupt"]) == 3
