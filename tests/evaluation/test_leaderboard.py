"""The leaderboard: shares of the unpruned score against plain Python, joined runs, several models, refusals."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from recorded_run import CONFIG, METHODS, Row, failed, write_run

from clustrs.cli import main
from clustrs.evaluation.config import expand_methods, read_settings
from clustrs.evaluation.report.leaderboard import overview, rank, read_entries, share, write_leaderboard
from clustrs.pruners import list_methods, method_class
from clustrs.tables import NOTHING

NONE, FASTER4, FASTER8, CLUSTRS4, CLUSTRS8 = METHODS
BOTH: dict[str, Any] = {"positions": "original", "attention": "proportional"}
PUBLISHED: dict[str, Any] = {"positions": "compact", "attention": "plain"}


def scores(folder: Path, name: str, keep: float, corruption: str) -> list[float]:
    """The scores of a cell, by question."""
    records = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    own = [
        r for r in records if (r["method"]["name"], r["method"]["keep"], r["corruption"]) == (name, keep, corruption)
    ]
    return [record["score"] for record in sorted(own, key=lambda record: str(record["item"]))]


def table(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    with (path / "leaderboard.csv").open() as file:
        keys = ("model", "method", "setting", "keep", "condition")
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}


def like_unpruned(rows: list[Row]) -> list[Row]:
    """FasterVLM with 4 tokens answers as the unpruned model does."""
    whole = {(r["item"], r["corruption"]): r["score"] for r in rows if r["method"] == NONE}
    return [{**r, "score": whole[r["item"], r["corruption"]]} if r["method"] == FASTER4 else r for r in rows]


def test_shares_are_means_of_ratios_with_paired_intervals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", like_unpruned, **PUBLISHED)
    write_leaderboard([run], tmp_path / "out")
    rows = table(tmp_path / "out")
    assert len(rows) == len(METHODS) * (len(CONFIG["corruptions"]) + 1)
    for name, keep in (("fastervlm", 8), ("clustrs", 4), ("clustrs", 8)):
        ratios = []
        for corruption in CONFIG["corruptions"]:
            own, whole = fmean(scores(run, name, keep, corruption)), fmean(scores(run, "none", 1.0, corruption))
            row = rows["mini-llava", name, "as published", str(keep), corruption]
            assert float(row["score"]) == pytest.approx(own, abs=1e-6)
            assert float(row["retention"]) == pytest.approx(own / whole, abs=1e-6)
            assert float(row["low"]) < float(row["retention"]) < float(row["high"])
            assert row["questions"] == "12"
            ratios.append(own / whole)
        mean = rows["mini-llava", name, "as published", str(keep), "mean"]
        assert float(mean["retention"]) == pytest.approx(fmean(ratios), abs=1e-6)
        assert (float(mean["tokens"]), mean["selection"]) == (keep, "")
    for corruption in (*CONFIG["corruptions"], "mean"):  # not paired, the interval would be as wide as the others
        row = rows["mini-llava", "fastervlm", "as published", "4", corruption]
        assert [float(row[name]) for name in ("retention", "low", "high")] == [1, 1, 1]


def test_methods_are_sorted_within_budgets_and_every_one_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    times = {"none": (0, 30), "fastervlm": (2, 10), "clustrs": (1, 12)}
    measured = [
        [m, {"selection": times[m["name"]][0], "prefill": times[m["name"]][1], "kv_bytes": 2**20}] for m in METHODS
    ]
    latency = {"machine": "abacus", "repeats": 3, "milliseconds": measured}
    (run / "latency.json").write_text(json.dumps(latency))
    for sort, first in (("retention", None), ("selection", "clustrs"), ("prefill", "fastervlm")):
        (group,) = rank(read_entries([run]), sort).values()
        assert [entry.budget for entry in group] == ["4", "4", "8", "8", "all"]
        assert {(entry.method, entry.budget) for entry in group[:-1]} == {
            (m["name"], str(m["keep"])) for m in METHODS[1:]
        }
        if first:
            assert [group[0].method, group[2].method] == [first] * 2
        else:
            means = [share([entry], slice(None)).mean or 0 for entry in group]
            assert means[0] > means[1]
            assert means[2] > means[3]
    assert [row.values[-1].text for row in overview(rank(read_entries([run]))).rows] == ["6.0", "6.0"]
    write_leaderboard([run], tmp_path / "out")
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    assert "12 questions; unpruned scores in per cent:" in text
    assert "abacus" in text
    row = next(line for line in text.splitlines() if line.startswith("| 8 | clustrs"))
    assert row.endswith("| 8.0 | 1.0 | 12.0 | 1.00 |")


def test_runs_of_one_model_are_joined_on_what_they_share(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", **PUBLISHED)
    records = [json.loads(line) for line in (whole / "answers.jsonl").read_text().splitlines()]
    kept = {"clean", "gaussian:2"}

    def only(methods: list[Row], items: int) -> Callable[[list[Row]], list[Row]]:
        names = {f"v1_{i}" for i in range(items)}
        return lambda _: [
            r for r in records if r["method"] in methods and r["item"] in names and r["corruption"] in kept
        ]

    first = write_run(
        tmp_path / "first",
        lambda _: [r for r in records if r["method"] in METHODS[:3]],
        **PUBLISHED,
        methods=METHODS[:3],
    )
    few: dict[str, Any] = {"corruptions": sorted(kept), "items": 7, **PUBLISHED}
    second = write_run(tmp_path / "second", only(METHODS[3:], 7), methods=METHODS[3:], **few)
    all_in_one = write_run(tmp_path / "one", only(METHODS, 7), methods=METHODS, **few)
    write_leaderboard([first, second], tmp_path / "joined")
    write_leaderboard([all_in_one], tmp_path / "single")
    joined = (tmp_path / "joined" / "leaderboard.csv").read_text()
    assert sorted(joined.splitlines()) == sorted((tmp_path / "single" / "leaderboard.csv").read_text().splitlines())
    assert "v1" not in joined
    assert {row["questions"] for row in table(tmp_path / "joined").values()} == {"7"}


def test_settings_have_rows_of_their_own_and_one_reference(tmp_path: Path) -> None:
    """It is the unpruned score as published, whichever run comes first."""
    both = write_run(tmp_path / "both", lambda rows: [{**r, "score": 0.25} for r in rows], **BOTH)
    published = write_run(tmp_path / "published", lambda rows: [{**r, "score": 0.5} for r in rows], **PUBLISHED)
    write_leaderboard([both, published], tmp_path / "out")
    rows = table(tmp_path / "out")
    assert rows["mini-llava", "clustrs", "as published", "4", "mean"]["retention"] == "1.000000"
    assert rows["mini-llava", "clustrs", "place and weight", "4", "mean"]["retention"] == "0.500000"
    assert [key for key in rows if key[1] == "none" and key[4] == "clean"] == [
        ("mini-llava", "none", "as published", "all", "clean")
    ]
    chosen = write_run(tmp_path / "auto", positions="auto", attention="auto", chosen=BOTH)
    assert {entry.setting for entry in read_entries([chosen])} == {"place and weight"}
    mixed = write_run(tmp_path / "mixed", positions="original", attention="plain", chosen=["hostile"])
    assert {entry.setting for entry in read_entries([mixed])} == {"original, plain"}


def test_models_are_averaged_and_levels_count_by_rank(tmp_path: Path) -> None:
    def constant(score: float) -> Any:
        return lambda rows: [{**r, "score": 1.0 if r["method"] == NONE else score} for r in rows]

    one = write_run(tmp_path / "one", constant(0.5), model="one", corruptions=["clean", "gaussian:1", "gaussian:2"])
    two = write_run(
        tmp_path / "two",
        constant(0.25),
        model="two",
        corruptions=["gaussian:0.3", "clean", "gaussian:0.1"],
        methods=[NONE, CLUSTRS4, CLUSTRS8],
    )
    found = overview(rank(read_entries([one, two])))
    assert found.columns == ("mean", "keep 4", "keep 8", "clean", "gaussian 1", "gaussian 2", "tokens")
    first, second = found.rows
    assert first.heads[0] == "clustrs"
    assert [value.text for value in first.values] == ["37.5"] * 6 + ["6.0"]
    assert second.heads[0] == "fastervlm"
    assert second.values[:-1] == (NOTHING,) * 6
    text = write_leaderboard([one, two], tmp_path / "out").terminal(80)
    assert max(map(len, text.splitlines())) <= 80
    other = write_run(tmp_path / "other", model="other", corruptions=["clean", "gaussian:1"])
    with pytest.raises(ValueError, match="as many levels of each, for all models"):
        write_leaderboard([one, other], tmp_path / "out")


def test_variants_of_a_method_are_told_apart_across_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", methods=[NONE, CLUSTRS4])
    second = write_run(tmp_path / "second", methods=[{**CLUSTRS4, "tau": 2.0}])
    assert [entry.method for entry in read_entries([first, second])] == ["none", "clustrs", "clustrs tau=2"]


def silent(rows: list[Row]) -> list[Row]:
    return [{**row, "score": 0.0} if row["method"] == NONE else row for row in rows]


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "missing": ([{"change": lambda rows: rows[:-1]}], "is incomplete"),
    "failed": ([{"change": lambda rows: [failed(rows[0]), *rows[1:]]}], "is incomplete"),
    "no unpruned": ([{"methods": METHODS[1:]}], "no run of mini-llava on mm-vet has the unpruned model"),
    "unpruned 0": ([{"change": silent}], "the unpruned mini-llava scores 0 on mm-vet"),
    "twice": ([{}, {"methods": METHODS[1:2]}], "fastervlm 4 .* is in another run"),
    "crops": ([{"crops": "all"}, {"crops": "base"}], "crops of run .* must be that of run"),
    "weights": ([{"model_files": {"a": "1"}}, {"model_files": {"a": "2"}}], "model_files of run"),
    "conditions": ([{"corruptions": ["clean"]}, {"corruptions": ["jpeg:30"]}], "must share questions and conditions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, expected = REFUSED[case]
    runs = [str(write_run(tmp_path / str(i), **own)) for i, own in enumerate(settings)]
    assert main(["leaderboard", *runs, "--output", str(tmp_path / "out")]) == 2
    with pytest.raises(ValueError, match=expected):
        read_entries([Path(run) for run in runs])
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_command_prints_a_table_and_nothing_of_a_file_runs_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    hostile = "<script>alert(1)</script>"
    run = write_run(tmp_path / "run", model=hostile, task="=1+1")
    assert main(["leaderboard", str(run), "--output", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["method", "setting", "mean", "keep", "4", "keep", "8"]
    assert max(map(len, lines[:5])) <= 80
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    assert page.count("<script>") == 1
    assert hostile not in page
    assert hostile not in (tmp_path / "out" / "leaderboard.md").read_text()
    assert "\n'=1+1," in (tmp_path / "out" / "leaderboard.csv").read_text()
    assert main(["leaderboard", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "it is not the folder of a run" in capsys.readouterr().err


def test_the_ready_configuration_has_every_method() -> None:
    """Two that are left out put others together, two are for videos."""
    settings = read_settings(Path("leaderboard"))
    names = [method["name"] for method in expand_methods(settings["methods"], settings["keep"][:1])]
    assert sorted(names) == sorted({*list_methods()} - {"denoise", "compose", "evs", "vidcom2"})
    assert [name for name in names if method_class(name).where != "encoder"] == names[-3:]
