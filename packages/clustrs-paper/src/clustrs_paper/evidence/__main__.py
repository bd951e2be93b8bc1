"""Measure a model, store the results, write the page."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from clustrs.cli import main as clustrs
from clustrs.evaluation.report.leaderboard import read_entries
from clustrs.evaluation.results import load_run
from clustrs_paper.evidence import clips, leaderboard, place_and_weight
from clustrs_paper.evidence.page import (
    DETAILS_PAGE,
    MODELS,
    PAGE,
    SMOL_PAGE,
    build,
    build_details,
    filled,
    pruned,
    stored_models,
)
from clustrs_paper.evidence.results import STORED, compact_rows, read_rows, write_rows
from clustrs_paper.studies import tuning

HERE = Path(__file__).parent
LOSSES = (0.1, 0.35, 0.5)
QUESTIONS = {"grid": 300, "parameters": 300}
STUDIES = {"stability": "40", "denoising": "24", "geometry": "40"}
"""Number of images of each study."""
PAPER_LEVELS = {"stability": ("0", "0.1", "0.5", "1", "2", "3"), "denoising": ("0.1", "0.5", "1", "2", "3")}
PLACE_AND_WEIGHT = "place-and-weight"
TUNING, TUNE_PAGE = STORED.parent / "tuning", PAGE.with_name("tune.md")
PARTS = ("levels", "grid", "parameters", *STUDIES, PLACE_AND_WEIGHT, "overhead")


def chosen_levels(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Map corruptions that are given by a loss to levels, from the table of levels."""
    return {
        f"{row['corruption']}@{100 * float(row['loss']):g}%": f"{row['corruption']}:{float(row['level']):g}"
        for row in rows
        if row["chosen"] == "True" and row["level"]
    }


def corruptions(name: str, levels: Mapping[str, str]) -> list[str]:
    """The corruptions of a configuration with the levels of a model. A loss that it never reaches is left out."""
    listed: list[str] = yaml.safe_load((HERE / f"{name}.yaml").read_text())["corrupt"]
    return [levels.get(text, text) for text in listed if "@" not in text or text in levels]


def study_levels(given: Sequence[str], chosen: Mapping[str, str]) -> list[str]:
    """The paper's levels of Gaussian noise and those of a model's curve, from mild to severe."""
    own = [text.partition(":")[2] for text in chosen.values() if text.startswith("gaussian:")]
    return sorted({*given, *own}, key=float)


def measure(model: str, part: str, folder: Path, extra: Sequence[str], questions: int | None = None) -> int:
    """Run one part for a model: a command of clustrs, which resumes by itself."""
    shared = ["--model", model, "--task", MODELS[model], *extra]
    output = ["--output", str(folder / part)]
    if part == "levels":
        return clustrs(["study", "levels", *shared, *output, "--losses", *map(str, LOSSES)])
    if part == PLACE_AND_WEIGHT:
        for setting in place_and_weight.SETTINGS:
            target = folder / part / place_and_weight.run_folder(setting)
            options = place_and_weight.eval_options(model, setting)
            code = clustrs(["eval", *shared, *options, "--output", str(target)])
            if code:
                return code
        return 0
    if part in QUESTIONS:
        listed = corruptions(part, chosen_levels(read_rows(folder / "levels" / "levels.csv")))
        options = [
            "--config",
            str(HERE / f"{part}.yaml"),
            "--limit",
            str(questions or QUESTIONS[part]),
            "--corrupt",
            *listed,
        ]
        return clustrs(["eval", *shared, *options, *output])
    if (folder / part / f"{part}.csv").exists():
        return 0
    options = ["--count", STUDIES[part]] if part in STUDIES else []
    if part in PAPER_LEVELS:
        chosen = chosen_levels(read_rows(folder / "levels" / "levels.csv"))
        options += ["--levels", *study_levels(PAPER_LEVELS[part], chosen)]
    return clustrs(["study", part, *shared, *options, *output])


def store(model: str, folder: Path) -> None:
    """Copy the tables, and the answers of complete runs in compact form."""
    for part in PARTS:
        target = STORED / f"{model}-{part}.csv"
        if part in QUESTIONS:
            if (folder / part / "answers.jsonl").exists():
                write_rows(target, compact_rows(load_run(folder / part)))
                if part == "grid":
                    shutil.copy(folder / part / "report.md", STORED / f"{model}-report.md")
        elif part == PLACE_AND_WEIGHT:
            rows = place_and_weight.stored_rows(folder / part)
            if rows:
                write_rows(place_and_weight.STORED / f"{model}.csv", rows)
        elif (folder / part / f"{part}.csv").exists():
            write_rows(target, read_rows(folder / part / f"{part}.csv"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m clustrs_paper.evidence", description=__doc__)
    parser.add_argument("command", choices=("run", "store", "clips", "leaderboard", "costs", "tuning", "page"))
    parser.add_argument("model", choices=tuple(MODELS), nargs="?")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS[:-1], help="some parts; overhead needs quiet")
    parser.add_argument("--questions", type=int, help="of the grid and of the parameters (default: 300)")
    parser.add_argument("--folder", type=Path, default=Path("out/evidence"))
    given, extra = parser.parse_known_args()
    if given.command == "page":
        models = stored_models()
        PAGE.write_text(build(models), encoding="utf-8")
        DETAILS_PAGE.write_text(build_details(models), encoding="utf-8")
        tuned = [row for model in MODELS for row in read_rows(TUNING / f"{model}-tuning.csv")]
        for path, name, block in (*place_and_weight.blocks(), (TUNE_PAGE, "tuning", tuning.block(tuned))):
            path.write_text(filled(path.read_text(encoding="utf-8"), block, name), encoding="utf-8")
        for model in MODELS:
            if place_and_weight.load(model):
                target = place_and_weight.STORED / f"{model}-report.md"
                target.write_text(place_and_weight.report(model), encoding="utf-8")
        path, block = SMOL_PAGE, pruned(models[0])
        path.write_text(filled(path.read_text(encoding="utf-8"), block, "grid"), encoding="utf-8")
        board = leaderboard.load()
        text = filled(leaderboard.PAGE.read_text(encoding="utf-8"), leaderboard.block(board), "leaderboard")
        for path, page in {leaderboard.PAGE: text, **leaderboard.pages(board)}.items():
            path.write_text(page, encoding="utf-8")
        return 0
    if given.command == "clips":
        return clips.run(given.folder / "clips", extra)
    if given.command == "tuning":  # of `clustrs study tuning --model M --output FOLDER/M`
        for model in MODELS:
            for name in ("tuning", "candidates"):
                if rows := read_rows(given.folder / model / f"{name}.csv"):
                    write_rows(TUNING / f"{model}-{name}.csv", rows)
        return 0
    if given.command in ("leaderboard", "costs"):  # of the runs in --folder, see docs/leaderboard.md
        settings = (place_and_weight.PUBLISHED, place_and_weight.BOTH)
        folders = [given.folder / leaderboard.run_folder(model, s) for model in leaderboard.MODELS for s in settings]
        entries = read_entries([folder for folder in folders if folder.exists()])
        leaderboard.store(leaderboard.with_costs(leaderboard.load(), entries) if given.command == "costs" else entries)
        return 0
    if given.model is None:
        parser.error(f"{given.command}: which model? {', '.join(MODELS)}")
    folder = given.folder / given.model
    if given.command == "store":
        store(given.model, folder)
        return 0
    for part in given.only:
        code = measure(given.model, part, folder, extra, given.questions)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
