"""The evidence page: it is what the stored results give, and its verdicts follow the stated rules."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded_run

from clustrs.embedded import DEFAULT
from clustrs.evaluation.config import read_settings
from clustrs.evaluation.metrics import Estimate, estimates
from clustrs.evaluation.results import Condition, load_run
from clustrs_paper.evidence import __main__ as command
from clustrs_paper.evidence import paper
from clustrs_paper.evidence.checks import RIVALS, Above, Below, Check, Claim, Verdict, Within, combine, compared, judge
from clustrs_paper.evidence.claims import CLAIMS
from clustrs_paper.evidence.page import (
    DETAILS_PAGE,
    MEASURES,
    MODELS,
    PAGE,
    SMOL_PAGE,
    anchor,
    build,
    build_details,
    by_group,
    claim_verdict,
    filled,
    measured_text,
    pruned,
    shown_methods,
    stored_models,
)
from clustrs_paper.evidence.results import (
    STORED,
    Answers,
    Stored,
    Term,
    compact_rows,
    lead,
    load,
    read_answers,
    read_rows,
    write_rows,
)

MEASURED = [{"name": name, "keep": 1.0 if name == "none" else 16} for name in ("none", "clustrs", "tome", "random")]
CLEAN, MILD, SEVERE = Condition("clean"), Condition("gaussian", 0.1), Condition("gaussian", 0.4)


def estimate(low: float | None, high: float | None) -> Estimate:
    return Estimate(100, 0.0 if low is None or high is None else (low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        (Above(), 0.1, 5.0, "holds"),
        (Above(), 0.1, 0.9, "does not hold"),
        (Above(), -5.0, -0.1, "does not hold"),
        (Above(), -0.9, 0.9, "does not hold"),
        (Above(), -0.9, 1.1, "inconclusive"),
        (Above(), 0.0, 5.0, "inconclusive"),
        (Above(-2.0, negligible=0), -1.9, 0.5, "holds"),
        (Above(-2.0, negligible=0), -2.1, 0.5, "inconclusive"),
        (Above(-2.0, negligible=0), -4.0, -2.1, "does not hold"),
        (Within(2.0), -1.9, 1.9, "holds"),
        (Within(2.0), -2.1, 1.9, "inconclusive"),
        (Within(2.0), -5.0, 5.0, "inconclusive"),
        (Within(2.0), 2.1, 3.0, "does not hold"),
        (Within(2.0), -3.0, -2.1, "does not hold"),
        (Below(50.0), 10.0, 49.0, "holds"),
        (Below(50.0), 40.0, 60.0, "inconclusive"),
        (Below(50.0), 51.0, 60.0, "does not hold"),
        (Above(), None, None, "inconclusive"),
    ],
)
def test_the_rules(rule: Any, low: float | None, high: float | None, verdict: Verdict) -> None:
    assert judge(rule, estimate(low, high)) == verdict


def test_without_a_number_nothing_is_judged() -> None:
    assert judge(Above(), None) == "not measured"
    assert judge(Above(), Estimate(0, None)) == "not measured"


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "inconclusive"], "inconclusive"),
        (["holds", "does not hold", "inconclusive"], "does not hold"),
        (["not measured", "not measured"], "not measured"),
        (["holds", "not measured"], "inconclusive"),
        (["does not hold", "not measured"], "does not hold"),
    ],
)
def test_the_verdict_on_a_claim(parts: list[Verdict], verdict: Verdict) -> None:
    assert combine(parts) == verdict


def answers(shares: dict[str, float], conditions: tuple[Condition, ...] = (CLEAN, MILD, SEVERE)) -> Answers:
    """Made-up answers: the first so many of 1000 questions are right with each method, at every budget."""
    right: dict[tuple[str, int | None, Condition], Any] = {}
    for method, share in shares.items():
        keeps: tuple[int | None, ...] = (None,) if method == "none" else (8, 16, 50, 144)
        for keep in keeps:
            for condition in conditions:
                right[method, keep, condition] = np.arange(1000) < 1000 * share
    return Answers("scenes", "made-up", right)


def test_a_contrast_is_a_mean_over_questions() -> None:
    generator = np.random.default_rng(0)
    cells = [(m, c) for m in ("clustrs", "fastervlm") for c in (CLEAN, MILD, SEVERE)]
    right: dict[tuple[str, int | None, Condition], Any] = {(m, 16, c): generator.random(40) < 0.6 for m, c in cells}
    found = Answers("scenes", "made-up", right).contrast(lead("clustrs", "fastervlm", 16, "gaussian"))
    values = np.zeros(40)
    for question in range(40):
        for condition in (MILD, SEVERE):
            ours, theirs = (right[m, 16, condition][question] for m in ("clustrs", "fastervlm"))
            values[question] += 50 * (float(ours) - float(theirs))
    assert found == estimates(values[None])[0]


def test_cells_of_different_length_are_compared_on_the_first_questions_of_both() -> None:
    long, short = np.arange(60) % 3 > 0, np.arange(20) % 2 > 0
    grid = Answers("scenes", "made-up", {("clustrs", 16, CLEAN): long, ("fastervlm", 16, CLEAN): short})
    expected = 100 * (long[:20].astype(float) - short)
    assert grid.contrast(lead("clustrs", "fastervlm", 16, "clean")) == estimates(expected[None])[0]


def test_equal_answers_are_no_proof_of_equal_methods() -> None:
    right = np.arange(60) % 3 > 0
    grid = Answers("scenes", "made-up", {("clustrs", 16, CLEAN): right, ("fastervlm", 16, CLEAN): right})
    found = grid.contrast(lead("clustrs", "fastervlm", 16, "clean"))
    assert found == Estimate(60, 0.0, -5.0, 5.0)
    assert judge(Above(), found) == "inconclusive"


def test_groups_of_conditions() -> None:
    others = (Condition("salt_pepper", 0.1), Condition("jpeg", 30.0))
    made = answers({"none": 0.9}, (CLEAN, MILD, SEVERE, *others))
    assert made.group("clean") == (CLEAN,)
    assert made.group("gaussian") == (MILD, SEVERE)
    assert made.group("gaussian 1") == (MILD,)
    assert made.group("gaussian 2") == (SEVERE,)
    assert made.group("gaussian 3") == ()
    assert made.group("noise") == (MILD, SEVERE, others[0])
    assert made.group("other") == (others[1],)
    assert made.group("all") == made.conditions


def test_claims_of_the_paper_leave_imagenet_c_out() -> None:
    fog = Condition("imagenet_c/fog", 3)
    made = answers({"clustrs": 0.5}, (CLEAN, MILD, fog))
    assert made.group("other") == ()
    assert made.group("all") == (CLEAN, MILD)
    assert made.group("imagenet_c/fog") == (fog,)


def test_where_the_model_is_blind_nothing_is_compared() -> None:
    made = answers({"none": 1.0, "clustrs": 0.5, "fastervlm": 0.4})
    blind = Answers("scenes", "made-up", {**made.right, ("none", None, SEVERE): np.arange(1000) < 390})
    assert made.group("gaussian") == (MILD, SEVERE)
    assert blind.group("gaussian") == (MILD,)
    assert blind.contrast([Term(1, "clustrs", 16, "gaussian 2")]) is None


def test_what_is_missing_is_not_compared() -> None:
    made = answers({"none": 1.0, "clustrs": 0.5})
    assert made.contrast(lead("clustrs", "fastervlm", 16, "clean")) is None
    assert made.contrast(lead("clustrs", "clustrs", 99, "clean")) is None


def verdicts(shares: dict[str, float]) -> dict[str, Verdict | None]:
    stored = Stored("mini-llava", grid=answers(shares))
    return {claim.title: claim_verdict(claim, stored) for claim in CLAIMS}


BETTER = "Better than attention and diversity with 16 tokens, clean images"


def test_verdicts_follow_from_the_answers() -> None:
    rivals = dict.fromkeys(RIVALS, 0.5)
    assert verdicts({"none": 0.9, "clustrs": 0.6, **rivals})[BETTER] == "holds"
    assert verdicts({"none": 0.9, "clustrs": 0.4, **rivals})[BETTER] == "does not hold"
    assert verdicts({"none": 0.9, "clustrs": 0.6, **rivals, "divprune": 0.6})[BETTER] == "does not hold"
    assert verdicts({"none": 0.9, "clustrs": 0.6})[BETTER] == "not measured"


def test_claims_about_other_models_are_left_empty() -> None:
    found = verdicts({"none": 0.9})
    assert found["SigLIP needs the salience"] is None
    assert found["MM-Vet: the absolute scores"] == "inconclusive"


def test_a_number_as_the_page_has_it() -> None:
    terms = lead("clustrs", "fastervlm", 16, "clean")
    check = compared("", terms)
    stored = Stored("mini-llava", grid=answers({"none": 0.9, "clustrs": 0.6, "fastervlm": 0.5}))
    assert stored.grid is not None
    found = stored.grid.contrast(terms)
    assert found is not None
    assert measured_text(check, stored) == f"+10.0 ({found.low:+.1f} to {found.high:+.1f}): holds"
    assert measured_text(check, Stored("mini-llava")) == "not measured yet"


def checks(title: str) -> tuple[Check, ...]:
    (claim,) = [claim for claim in CLAIMS if claim.title == title]
    return claim.checks


@pytest.mark.parametrize(
    ("title", "numbers"),
    [
        (BETTER, [6.0, 3.9, 3.2]),
        ("Ranking by attention falls apart under noise", [13, 0, 0]),
        ("RRS gains more under more noise", [1.9]),
        ("SigLIP needs the salience", [13.0, None]),
        ("Under a third of the tokens is enough with SigLIP", [6.1, 0.2]),
        ("Clipping alpha is essential", [1.8]),
    ],
)
def test_numbers_of_the_paper(title: str, numbers: list[float | None]) -> None:
    found = [check.paper for check in checks(title)]
    assert [None if value is None else round(value, 1) for value in found] == numbers


def test_the_paper_s_gain_of_rrs_is_the_mean_of_its_column() -> None:
    (mean, mild, severe) = checks("Residual shrinkage (RRS) gains at small k")
    assert mean.paper == pytest.approx(100 * (0.018 + 0.027 + 0.029 + 0.037) / 4)
    assert (mild.paper, severe.paper) == (1.8, 3.7)


def test_methods_are_compared_where_the_paper_has_both() -> None:
    """Of VisionZip it has no motion blur and no JPEG."""
    terms = lead("clustrs", "visionzip", 16, "other")
    assert paper.contrast(terms) == pytest.approx(100 * ((0.250 - 0.225) + (0.214 - 0.210)) / 2)


def every_answer_right_or_wrong(rows: list[recorded_run.Row]) -> list[recorded_run.Row]:
    return [{**row, "score": float(row["score"] >= 0.5)} for row in rows]


def test_stored_answers_come_back(tmp_path: Path) -> None:
    run = load_run(recorded_run.write_run(tmp_path / "run", every_answer_right_or_wrong))
    rows = compact_rows(run)
    write_rows(tmp_path / "made-up-grid.csv", rows)
    stored = load("made-up", tmp_path)
    assert stored.grid is not None
    assert stored.parameters is None
    assert stored.grid.questions == 12
    assert len(stored.grid.right) == len(run.methods) * len(run.conditions)
    for m, method in enumerate(run.methods):
        for c, condition in enumerate(run.conditions):
            expected = run.scores[m, c, 0].astype(bool)
            keep = None if method.keep is None else int(method.keep)
            assert (stored.grid.right[method.name, keep, condition] == expected).all()


@pytest.mark.parametrize("change", [lambda rows: rows, lambda rows: every_answer_right_or_wrong(rows)[1:]])
def test_only_complete_runs_are_stored(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="a complete run with one seed"):
        compact_rows(load_run(recorded_run.write_run(tmp_path / "run", change)))


def test_parameters_are_part_of_a_method_s_name(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"tau": 0.25}, {"clip": [0.0, 1.0]}, {"salience": False}, {"shrink": False}]
    methods = [{"name": "clustrs", "keep": 4, "seed": 0, **variant} for variant in variants]
    run = load_run(recorded_run.write_run(tmp_path / "run", every_answer_right_or_wrong, methods=methods))
    names = dict.fromkeys(row["method"] for row in compact_rows(run))
    expected = ["", " tau=0.25", " clip=0-1", " salience=false", " shrink=false"]
    assert list(names) == [f"clustrs{end}" for end in expected]


def test_the_grid_asks_for_what_the_claims_compare() -> None:
    levels = {
        f"{name}@{loss:g}%": f"{name}:{loss / 100}" for name in ("gaussian", "salt_pepper") for loss in (10, 35, 50)
    }
    grid = command.corruptions("grid", levels)
    assert len(grid) == 12
    assert grid[:4] == ["clean", "gaussian:0.1", "gaussian:0.35", "gaussian:0.5"]
    del levels["gaussian@50%"]
    assert command.corruptions("grid", levels) == [text for text in grid if text != "gaussian:0.5"]


def test_levels_come_from_the_table_of_the_curve() -> None:
    rows = [
        {"corruption": "gaussian", "chosen": "False", "level": "0.1", "loss": "0.1"},
        {"corruption": "gaussian", "chosen": "True", "level": "0.25", "loss": "0.35"},
        {"corruption": "gaussian", "chosen": "True", "level": "", "loss": "0.5"},
    ]
    assert command.chosen_levels(rows) == {"gaussian@35%": "gaussian:0.25"}


def test_studies_look_at_the_paper_s_levels_and_at_the_model_s() -> None:
    chosen = {"gaussian@10%": "gaussian:0.21", "gaussian@50%": "gaussian:0.5", "salt_pepper@10%": "salt_pepper:0.1"}
    assert command.study_levels(("0", "0.1", "0.5", "3"), chosen) == ["0", "0.1", "0.21", "0.5", "3"]


def test_the_page_is_what_the_stored_results_give() -> None:
    models = stored_models()
    assert PAGE.read_text(encoding="utf-8") == build(models)
    assert DETAILS_PAGE.read_text(encoding="utf-8") == build_details(models)
    smol = SMOL_PAGE.read_text(encoding="utf-8")
    assert smol == filled(smol, pruned(load("smol-llava")), "grid")


def test_the_page_has_every_claim_and_its_links_lead_somewhere() -> None:
    models = [Stored(model) for model in MODELS]
    text = build_details(models)
    headings = {anchor(0, Claim(line, "")).removeprefix("0-") for line in re.findall(r"^## (.*)$", text, re.M)}
    links = re.findall(r"\(results/evidence/claims\.md#([^)]*)\)", build(models))
    assert len(links) == len(CLAIMS)
    assert set(links) <= headings


def test_every_number_of_the_geometry_is_shown() -> None:
    from clustrs_paper.studies.geometry import MEASURES as measured

    assert list(MEASURES) == list(measured)


def test_the_demo_looks_where_its_model_still_answers() -> None:
    """At the levels of the stored curve that cost it 10 % and 35 %, with enough questions."""
    demo = read_settings(Path("demo"))
    assert not {"model", "task"} & set(demo)  # they are the default ones
    levels = command.chosen_levels(read_rows(STORED / f"{DEFAULT}-levels.csv"))
    assert demo["corrupt"] == ["clean", *(levels[f"gaussian@{loss}%"] for loss in (10, 35))]
    assert demo["keep"] == [16, 64]
    assert demo["limit"] >= 200


def test_tables_of_results_show_every_method_of_their_run() -> None:
    """None is left out that was measured at the same budget."""
    for model in stored_models():
        assert model.grid is not None
        measured = {method for method, keep, _ in model.grid.right if keep in (None, 16)}
        assert set(shown_methods(model.grid)) == measured


def test_no_text_promises_cleaner_tokens() -> None:
    """What was measured: shrinkage raises scores, but brings tokens nearer to the clean ones only in strong noise."""
    root = PAGE.parents[1]
    (claim,) = (claim for claim in CLAIMS if claim.title == "RRS removes noise from the tokens")
    verdicts = [claim_verdict(claim, model) for model in stored_models()]
    assert any(verdict == "does not hold" for verdict in verdicts)
    texts = [root / "README.md", root / "pyproject.toml", *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]
    texts += [*(root / "src").rglob("*.j2"), *(root / "packages").glob("*/README.md")]
    promised = re.compile(r"cleaner\b.{0,20}\btokens?|\bto remove noise|removes noise from", re.IGNORECASE)
    found = {
        path: promised.findall(path.read_text(encoding="utf-8")) for path in texts if path not in (PAGE, DETAILS_PAGE)
    }
    assert {path for path, words in found.items() if words} == set()


def test_a_model_without_results_says_so() -> None:
    text = build([Stored("photo-llava")])
    assert "**photo-llava**, task photos: not measured yet." in text
    assert "**holds**" not in text.partition("## Verdicts")[2]


def test_nothing_is_stored_where_there_is_no_table(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "missing.csv") == []
    assert read_answers([]) is None


def test_both_settings_stand_side_by_side_for_every_group_of_conditions() -> None:
    noisy = (*(Condition("salt_pepper", 0.3), MILD), CLEAN, Condition("jpeg", 30.0), Condition("imagenet_c/fog", 3.0))
    right: dict[tuple[str, int | None, Condition], Any] = {}
    for method, keep in product(("clustrs", "random", "fastv"), (8, 16, 32, 64, 144)):
        for number, condition in enumerate(noisy):
            right[method, keep, condition] = np.arange(100) < keep / 2 + 10 * number
    del right["random", 16, MILD]
    both = Answers("scenes", "made-up", {key: ~cell for key, cell in right.items() if key[0] != "fastv"})
    right.update({("none", None, condition): np.arange(100) < 90 for condition in noisy})
    grid = Answers("scenes", "made-up", right)
    text = by_group([Stored("made-up", grid, both=both)])
    assert "## Pruned made-up" in text
    assert "100 questions in each condition." in text
    assert re.findall(r"^\w.*:$", text, re.M) == [
        "Clean:",
        "Gaussian and salt-and-pepper noise, mean of 2 levels:",
        "Brightness, contrast, cutout, motion blur and JPEG, mean of 1:",
        "ImageNet-C's shot noise, defocus blur and fog, mean of 1:",
    ]
    clean, noise, *_ = text.split("\n\n")[3::2]
    assert "| all tokens | 90 | 90 | 90 | 90 | 90 |" in clean
    assert "| ClustRS | 24 / 76 | 28 / 72 | 36 / 64 | 52 / 48 | 92 / 8 |" in clean
    assert "| FastV | 24 | 28 | 36 | 52 | 92 |" in clean
    assert "| ClustRS | 9 / 91 | 13 / 87 | 21 / 79 | 37 / 63 | 77 / 23 |" in noise
    assert "| random | 9 / 91 | - / - | 21 / 79 |" in noise
    assert clean.endswith("| mean gain by place and weight | +52 | +44 | +28 | -4 | -84 |")
    assert noise.strip().endswith("| mean gain by place and weight | +82 | - | +58 | +26 | -54 |")


def test_methods_are_ranked_by_all_conditions_against_random_tokens() -> None:
    conditions, few = (CLEAN, MILD, Condition("imagenet_c/fog", 3.0)), np.arange(60)
    scores = {"random": 30, "clustrs": 12, "fastv": 45, "tome": 54}
    cells = product(scores, (8, 16, 32, 64, 144), conditions)
    right: dict[tuple[str, int | None, Condition], Any] = {(m, k, c): few < scores[m] for m, k, c in cells}
    both = Answers("scenes", "made-up", {key: cell[::-1] for key, cell in right.items() if key[0] != "fastv"})
    del right["tome", 64, MILD]
    right |= {("none", None, condition): few < 57 for condition in conditions}
    more = {key: np.r_[cell, ~cell] for key, cell in both.right.items() if key[:2] in (("random", 16), ("tome", 16))}
    stored = Stored("made-up", Answers("scenes", "made-up", right), both=Answers("", "", {**both.right, **more}))
    lines = pruned(stored).splitlines()
    assert lines[0] == "|  | k = 8 | k = 16 | k = 32 | k = 64 | k = 144 | k = 16, minus random |"
    names = ["all tokens", "FastV", "ToMe", "random", "ClustRS", "mean gain by place and weight"]
    assert [line.split(" | ")[0][2:] for line in lines[2:8]] == names
    random = both.right["random", 16, CLEAN]
    found = estimates(100 * (right["fastv", 16, CLEAN].astype(float) - random)[None])[0]
    assert lines[3] == f"| FastV {'| 75 ' * 5}| +25.0 ({found.low:+.1f} to {found.high:+.1f}), 60 questions |"
    assert lines[4].startswith("| ToMe | 90 / 90 | 90 / 90 | 90 / 90 | - / 90 | 90 / 90 | +0.0 (")
    assert lines[4].endswith(") |")
    assert lines[5].endswith("| - |")


def test_another_page_says_what_place_and_weight_give_smol_llava() -> None:
    lines = pruned(load("smol-llava")).partition("More questions")[0].splitlines()
    pairs = [tuple(map(int, pair)) for line in lines for pair in re.findall(r"(\d+) / (\d+)", line)]
    assert all(before < after for before, after in pairs)
    (gains,) = (re.findall(r"\+(\d+)", line) for line in lines if line.startswith("| mean gain"))
    *most, last = map(int, gains)
    text = " ".join((PAGE.parent / "place-and-weight.md").read_text(encoding="utf-8").split())
    assert f"raise all {len(pairs) // 5} methods that prune before" in text
    assert f"by {min(most)} to {max(most)} points up to k = 64, by {last} at 144" in text


def test_methods_that_were_asked_more_questions_have_a_table_with_intervals() -> None:
    conditions = (CLEAN, MILD, Condition("jpeg", 30.0))
    few, many = np.arange(60) < 30, np.arange(300) < 150
    right: dict[tuple[str, int | None, Condition], Any] = {("none", None, c): many for c in conditions}
    for method, cells in {"clustrs": (many, many, many), "random": (few, few, few), "tome": (many, many, few)}.items():
        right.update({(method, 16, c): cell for c, cell in zip(conditions, cells, strict=True)})
    both = Answers("scenes", "made-up", {key: cell for key, cell in right.items() if key[1]})
    text = pruned(Stored("made-up", Answers("scenes", "made-up", right), both=both))
    table = text.partition("More questions, 300, with 95 % intervals, k = 16:\n\n")[2]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| all tokens", "| ClustRS"]
    found = estimates(100 * many[None].astype(np.float64))[0]
    assert found.low is not None
    assert found.high is not None
    expected = f"{found.mean:.1f} ±{(found.high - found.low) / 2:.1f}"
    assert f"| ClustRS | {' | '.join([f'{expected} / {expected}'] * 3)} |" in table
    assert f"| all tokens | {' | '.join([expected] * 3)} |" in table
    less = Answers("scenes", "made-up", {key: cell[:60] for key, cell in both.right.items()})
    assert "More questions" not in pruned(Stored("made-up", Answers("scenes", "made-up", right), both=less))


def test_cells_that_were_not_run_are_counted() -> None:
    right: dict[tuple[str, int | None, Condition], Any] = {}
    for method, keep in product(("clustrs", "random"), (8, 16, 32, 64, 144)):
        right[method, keep, CLEAN] = np.ones(4, bool)
    whole = Answers("scenes", "made-up", right)
    left = Answers("scenes", "made-up", {key: cell for key, cell in right.items() if key[:2] != ("random", 8)})
    text = build([Stored("made-up", whole, both=left)])
    assert (
        "1 conditions; 2 methods as published (all cells), 2 methods with place and weight (1 of 10 cells not run)."
        in text
    )


def test_a_stored_report_is_linked(tmp_path: Path) -> None:
    run = load_run(recorded_run.write_run(tmp_path / "run", every_answer_right_or_wrong, methods=MEASURED))
    write_rows(tmp_path / "mini-llava-grid.csv", compact_rows(run))
    link = "[Full report](results/evidence/mini-llava-report.md)."
    assert link not in build([load("mini-llava", tmp_path)])
    (tmp_path / "mini-llava-report.md").write_text("# Report")
    assert link in build([load("mini-llava", tmp_path)])
