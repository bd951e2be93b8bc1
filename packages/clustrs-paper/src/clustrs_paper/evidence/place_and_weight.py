"""Place and weight: scores with compact or original positions and with plain or proportional attention.

Settings are picked on the questions of even index (ids sorted), and every number is of the others.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.embedded import DEFAULT
from clustrs.evaluation.metrics import Values, estimates, retention
from clustrs.evaluation.results import Condition, load_run
from clustrs_paper.evidence import results
from clustrs_paper.evidence.results import LABELS, UNPRUNED, Answers, compact_rows, read_answers, read_rows, table

STORED = results.STORED.parent / "place-and-weight"
PUBLISHED, PLACE, WEIGHT, BOTH = "as published", "place", "weight", "both"
SETTINGS = {
    PUBLISHED: ("compact", "plain"),
    PLACE: ("original", "plain"),
    WEIGHT: ("compact", "proportional"),
    BOTH: ("original", "proportional"),
}
"""Positions and attention of each setting; the second and the third show what either part does alone."""
METHODS = (
    UNPRUNED,
    "random",
    "grid",
    "clustrs",
    "clustermeans",
    "divprune",
    "fastervlm",
    "tome",
    "visionzip",
    "vispruner",
)
FEW = (UNPRUNED, "clustrs", "clustermeans", "divprune", "tome")
BUDGETS, FEW_BUDGETS = (8, 16, 64, 144), (16, 64)
QUESTIONS = {"mini-llava": 160, "mini-onevision": 120, "photo-llava": 300}
NOISE = {
    "mini-llava": ("gaussian:0.18", "gaussian:0.38", "salt_pepper:0.1", "salt_pepper:0.28"),
    "mini-onevision": ("gaussian:0.21", "gaussian:0.33", "salt_pepper:0.13", "salt_pepper:0.28"),
    "photo-llava": ("gaussian:0.1", "gaussian:0.24", "salt_pepper:0.021", "salt_pepper:0.07"),
}
"""Levels at which the unpruned model loses about 10 and 35 % of its clean score."""
SMOL = "smol-llava"
"""Its grid in both settings is stored with the evidence."""
CROPS = {"mini-onevision": "base"}
CLEAN = Condition("clean")
OURS = {"clustermeans": "**ClusterMeans** (ours)", "clustrs": "ClustRS (the paper)"}
Settings = Mapping[str, Answers]


def run_folder(setting: str) -> str:
    return "-".join(SETTINGS[setting])


def eval_options(model: str, setting: str) -> list[str]:
    """Return the options of `clustrs eval` for a model in a setting: everything for the first and the last of them."""
    positions, attention = SETTINGS[setting]
    whole = setting in (PUBLISHED, BOTH)
    options = ["--limit", str(QUESTIONS[model]), "--methods", *(METHODS if whole else FEW)]
    options += ["--keep", *map(str, BUDGETS if whole else FEW_BUDGETS), "--positions", positions]
    options += ["--attention", attention, "--corrupt", "clean", *NOISE[model][: None if whole else 1]]
    return [*options, *(["--crops", CROPS[model]] if model in CROPS else [])]


def stored_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the complete runs of a model: means, intervals and shares of the held-out questions."""
    rows: list[dict[str, Any]] = []
    found_grids: dict[str, Answers] = {}
    for setting, (positions, attention) in SETTINGS.items():
        path = folder / run_folder(setting)
        if not (path / "answers.jsonl").exists():
            continue
        run = load_run(path)
        if (run.config.get("positions"), run.config.get("attention")) != (positions, attention):
            raise ValueError(f"{str(path)!r} must be a run with {positions} positions and {attention} attention")
        own = compact_rows(run)
        grid = read_answers(own)
        assert grid is not None
        found_grids[setting] = grid
        if PUBLISHED not in found_grids:
            raise ValueError(f"{str(folder / run_folder(PUBLISHED))!r} is missing: it has the unpruned scores")
        for row in own:
            condition = Condition(row["corruption"], float(row["level"]) if row["level"] else None)
            values = held_out(grid, row["method"], row["keep"] or None, [condition])
            found, share = estimates(values[None])[0], share_kept(found_grids, values, [condition])
            numbers = {"mean": found.mean, "low": found.low, "high": found.high, "share": share}
            head = {"task": row["task"], "model": row["model"], "positions": positions, "attention": attention}
            texts = {name: "" if value is None else f"{value:.3f}" for name, value in numbers.items()}
            rows.append({**head, **{name: row[name] for name in ROW}, **texts, "right": row["right"]})
    return rows


ROW = ("method", "keep", "corruption", "level", "questions")


def load(model: str, folder: Path = STORED) -> Settings:
    """Load what is stored of a model, by setting."""
    rows = read_rows(folder / f"{model}.csv")
    parts = {s: [row for row in rows if (row["positions"], row["attention"]) == SETTINGS[s]] for s in SETTINGS}
    return {s: answers for s, own in parts.items() if (answers := read_answers(own)) is not None}


def noise_of(grid: Answers) -> list[Condition]:
    return [condition for condition in grid.conditions if condition != CLEAN]


def held_out(grid: Answers, method: str, keep: int | None, conditions: Sequence[Condition], half: int = 1) -> Values:
    """Return the scores [items] of a half of the questions, in per cent, averaged over conditions."""
    budget = None if method == UNPRUNED else keep
    cells = [grid.right[method, budget, condition][half::2] for condition in conditions]
    values: Values = np.stack(cells).astype(np.float64).mean(axis=0)
    return 100 * values


def share_kept(settings: Settings, values: Values, conditions: Sequence[Condition]) -> float | None:
    """Return the per cent of the unpruned model's score that some values are.

    That score is the one with compact positions. Others are the same, except where the base crop alone is read: its
    tokens then have other positions in the whole prompt.
    """
    share = retention(values, held_out(settings[PUBLISHED], UNPRUNED, None, conditions))
    return None if share is None else 100 * share


def picked(settings: Settings) -> str:
    """Return the setting that is best on the picking half: mean over what was measured in all four."""
    means = {}
    for setting, grid in settings.items():
        conditions = [condition for condition in grid.conditions if condition in shared_conditions(settings)]
        cells = [held_out(grid, m, k, conditions, half=0) for m in FEW[1:] for k in FEW_BUDGETS]
        means[setting] = float(np.mean(cells))
    return max(means, key=means.__getitem__)


def shared_conditions(settings: Settings) -> list[Condition]:
    first, *others = settings.values()
    return [condition for condition in first.conditions if all(condition in grid.conditions for grid in others)]


def interval(values: Values) -> str:
    found = estimates(values[None])[0]
    return f"{found.mean:.1f} ({found.low:.1f} to {found.high:.1f})"


def reach(values: Values) -> float:
    """Return half of the 95 % interval of a mean."""
    found = estimates(values[None])[0]
    return 0.0 if found.low is None or found.high is None else (found.high - found.low) / 2


def short(values: Values) -> str:
    """Return a mean and half of its 95 % interval."""
    found = estimates(values[None])[0]
    if found.mean is None or found.low is None or found.high is None:
        return "-"
    return f"{found.mean:.1f} \N{PLUS-MINUS SIGN}{(found.high - found.low) / 2:.1f}"


def parts_table(models: Sequence[str], folder: Path = STORED, clean_only: bool = False) -> str:
    """Build the table of what either part gives: ClustRS in the four settings, and ClusterMeans in the picked one."""
    rows = []
    for model in models:
        settings = load(model, folder)
        if set(settings) != set(SETTINGS):
            continue
        best = picked(settings)
        for condition in [CLEAN] if clean_only else shared_conditions(settings):
            for keep in FEW_BUDGETS:
                cells = [("clustrs", s) for s in SETTINGS] + [("clustermeans", best)]
                texts = [short(held_out(settings[s], m, keep, [condition])) for m, s in cells]
                texts = [f"**{text}**" if s == best else text for text, (_, s) in zip(texts, cells, strict=True)]
                whole = held_out(settings[PUBLISHED], UNPRUNED, None, [condition]).mean()
                rows.append([model if clean_only else f"{model}, {condition}", str(keep), f"{whole:.1f}", *texts])
    head = ["", "k", "all tokens", *(f"ClustRS, {s}" for s in SETTINGS), "ClusterMeans, as picked"]
    return table(head, rows, numbers=len(head) - 1)


def label(method: str) -> str:
    return OURS.get(method, LABELS.get(method, method))


def pruning_methods(grid: Answers) -> list[str]:
    """Return the methods that prune: ours first, then in the order of all tables."""
    measured = {method for method, *_ in grid.right if method != UNPRUNED}
    return sorted(measured, key=lambda m: (m not in OURS, list(OURS).index(m) if m in OURS else list(LABELS).index(m)))


def kept_by(settings: Settings) -> str:
    """Return the share of the unpruned score that four methods keep with 16 tokens on clean images, as picked."""
    grid = settings[picked(settings)]
    kept = {m: share_kept(settings, held_out(grid, m, 16, [CLEAN]), [CLEAN]) for m in FEW[1:]}
    return ", ".join(f"{LABELS[m]} {share:.0f} %" for m, share in kept.items())


def kept_with_both(stored: results.Stored) -> str:
    """Return the share of the unpruned score that five methods keep with 16 tokens of a grid on whose questions no
    setting was picked, clean / under noise, with place and weight."""
    assert stored.grid is not None
    assert stored.both is not None
    shares: dict[str, list[str]] = {method: [] for method in (*FEW[1:], "fastervlm")}
    for group in map(stored.grid.group, ("clean", "noise")):
        cells = {m: [stored.both.right[m, 16, c] for c in group] for m in shares}
        n = min(len(cell) for own in cells.values() for cell in own)
        whole = np.mean([stored.grid.right[UNPRUNED, None, c][:n] for c in group])
        for method, own in cells.items():
            shares[method].append(f"{100 * np.mean([cell[:n] for cell in own]) / whole:.0f}")
    return ", ".join(f"{LABELS[m]} {' / '.join(own)} %" for m, own in shares.items())


def first_table(model: str = DEFAULT, folder: Path = STORED) -> str:
    """Build the table of every method, clean and noisy, as published and with place and weight."""
    settings = load(model, folder)
    grid = settings[BOTH]
    groups = [(keep, conditions) for keep in FEW_BUDGETS for conditions in ([CLEAN], noise_of(grid))]
    whole = [held_out(settings[PUBLISHED], UNPRUNED, None, conditions) for _, conditions in groups]
    rows = [["all tokens", *(f"{values.mean():.1f}" for values in whole)]]
    halves: list[float] = []
    for method in pruning_methods(grid):
        cells = []
        for keep, conditions in groups:
            pair = [held_out(settings[setting], method, keep, conditions) for setting in (PUBLISHED, BOTH)]
            halves += map(reach, pair)
            cells.append(" / ".join(f"{values.mean():.1f}" for values in pair))
        rows.append([label(method), *cells])
    n = len(held_out(grid, UNPRUNED, None, [CLEAN]))
    text = f"""\
Right answers of {model} in per cent, as published / with place and weight, on {n} questions of the task `{grid.task}`
on which no setting was picked; 95 % intervals reach at most {max(halves):.0f} points to either side. Noisy: mean of two
levels each of Gaussian noise and of salt and pepper. ClusterMeans, place and weight are ours; ClustRS is the paper's.
"""
    head = ["", *(f"k = {keep}, {words}" for keep in FEW_BUDGETS for words in ("clean", "noisy"))]
    return f"{text}\n{table(head, rows, numbers=len(groups))}"


def headline(model: str = DEFAULT, folder: Path = STORED) -> str:
    """Build the README's first numbers: what ClusterMeans keeps with 16 tokens, as published and not, and elsewhere."""
    settings = load(model, folder)
    noise = noise_of(settings[BOTH])
    shares = {
        name: [share_kept(settings, held_out(settings[name], "clustermeans", 16, on), on) for on in ([CLEAN], noise)]
        for name in (BOTH, PUBLISHED)
    }
    (clean, noisy), (clean_before, noisy_before) = shares.values()
    n = len(held_out(settings[BOTH], UNPRUNED, None, [CLEAN]))
    text = f"""\
**With 16 of 576 visual tokens {model} keeps {clean:.0f} % of its unpruned score, {noisy:.0f} % on noisy images**
(ClusterMeans; {n} questions on which no setting was picked). As other codes prune, without each survivor's place and
weight, it would keep {clean_before:.0f} and {noisy_before:.0f} %.
"""
    stored = {other: load(other, folder) for other in QUESTIONS if other != model}
    others = [f"{other}: {kept_by(own)}" for other, own in stored.items() if own]
    smol = results.load(SMOL)
    if smol.grid and smol.both:
        text += f"""\

What is left of the score of [{SMOL}](docs/smol-llava.md), a pretrained CLIP and SmolLM2, with 16 of its 196 tokens,
clean / noisy: {kept_with_both(smol)}.
"""
    return text + (f"Other models with 16 tokens, clean: {'; '.join(others)}.\n" if others else "")


def means_table(model: str = DEFAULT, folder: Path = STORED) -> str:
    """Build the table of ClustRS and ClusterMeans at two budgets, as published and with both."""
    settings = load(model, folder)
    cells = [(m, s) for m in OURS for s in (PUBLISHED, BOTH)]
    rows = [
        [f"k = {keep}, {words}", *(short(held_out(settings[s], m, keep, c)) for m, s in cells)]
        for words, c in (("clean", [CLEAN]), ("noisy", noise_of(settings[BOTH])))
        for keep in FEW_BUDGETS
    ]
    return table(["", *(f"{LABELS[m]}, {s}" for m, s in cells)], rows, numbers=len(cells))


def method_text(methods: Sequence[str], model: str = DEFAULT, folder: Path = STORED) -> str:
    """Return the scores of methods in words, as published and with both."""
    settings = load(model, folder)
    n = len(held_out(settings[BOTH], UNPRUNED, None, [CLEAN]))
    lines = [f"Right answers of {model} in per cent, as published / with place and weight ({n} questions):\n"]
    for method in methods:
        cells = []
        for keep in FEW_BUDGETS:
            pairs = []
            for words, conditions in (("clean", [CLEAN]), ("noisy", noise_of(settings[BOTH]))):
                scores = [held_out(settings[s], method, keep, conditions).mean() for s in (PUBLISHED, BOTH)]
                pairs.append(f"{scores[0]:.1f} / {scores[1]:.1f} {words}")
            cells.append(f"k = {keep}: {', '.join(pairs)}")
        lines.append(f"- {LABELS[method]}, {'; '.join(cells)}.")
    return "\n".join(lines) + "\n"


PAGES = {"baselines": ("random", "grid")} | {
    m: (m,) for m in METHODS if m not in (UNPRUNED, "random", "grid", "clustermeans")
}
"""Pages of methods, and the methods that each shows."""


def blocks() -> list[tuple[Path, str, str]]:
    """Return the tables of other pages: the page, the name of the table's place there, and the table."""
    docs = STORED.parents[1]
    return [
        (docs.parent / "README.md", "evidence", headline()),
        (docs / "place-and-weight.md", "methods", first_table()),
        (docs / "place-and-weight.md", "parts", parts_table(list(QUESTIONS), clean_only=True)),
        (docs / "methods" / "clustermeans.md", "measured", means_table()),
        *((docs / "methods" / f"{page}.md", "measured", method_text(methods)) for page, methods in PAGES.items()),
    ]


def report(model: str, folder: Path = STORED) -> str:
    """Build the report of a model: the parts, and every method in every cell of the two full settings."""
    settings = load(model, folder)
    any_grid = next(iter(settings.values()))
    n = len(held_out(any_grid, UNPRUNED, None, [CLEAN]))
    lines = [
        f"# Place and weight: {model}\n",
        f"Task {any_grid.task}. Right answers in per cent with 95 % intervals, and per cent of the unpruned model, on "
        f"the {n} held-out questions of {any_grid.questions}. Written by `make evidence`.\n",
    ]
    if set(settings) == set(SETTINGS):
        best = picked(settings)
        words = f"{best} ({' positions, '.join(SETTINGS[best])} attention)"
        lines += ["## Parts\n", f"Picked on the other {any_grid.questions - n} questions: {words}; bold.\n"]
        lines.append(parts_table([model], folder))
    for setting in (PUBLISHED, BOTH):
        if setting not in settings:
            continue
        grid = settings[setting]
        noise = noise_of(grid)
        columns = {"clean": [CLEAN], **{str(c): [c] for c in noise}, "mean of the noisy": noise}
        rows = []
        for method in [UNPRUNED, *pruning_methods(grid)]:
            budgets = [None] if method == UNPRUNED else sorted({k for m, k, _ in grid.right if m == method and k})
            for keep in budgets:
                cells = []
                for conditions in columns.values():
                    values = held_out(grid, method, keep, conditions)
                    cells.append(f"{interval(values)}, {share_kept(settings, values, conditions):.0f} %")
                rows.append([label(method), "all" if keep is None else str(keep), *cells])
        words = " positions, ".join(SETTINGS[setting])
        lines += [f"## {setting.capitalize()}: {words} attention\n", table(["", "k", *columns], rows, len(columns))]
    commands = [
        f"    clustrs eval --model {model} {' '.join(eval_options(model, s))} --output out/{model}-{run_folder(s)}"
        for s in settings
    ]
    lines += ["## Repeating it\n", "\n".join(commands)]
    return "\n".join(lines) + "\n"
