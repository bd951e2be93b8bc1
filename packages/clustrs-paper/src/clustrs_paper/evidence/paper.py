"""The paper's numbers for the same comparisons, from its tables."""

from collections.abc import Iterable, Sequence

import numpy as np

from clustrs_paper.evidence.results import NOISES, Term, plain
from clustrs_paper.tables import SCORE_TABLES, PaperCell, paper_table

LLAVA, ONEVISION = "llava-1.5-7b", "llava-onevision-7b"
MAIN = tuple(name for name in SCORE_TABLES if not name.startswith(("sensitivity", "ablation", "scienceqa")))
Where = tuple[str, float | None]


def contrast(terms: Iterable[Term], tables: Sequence[str] = MAIN, model: str = LLAVA) -> float | None:
    """The weighted sum of the paper's mean MM-Vet scores, in points; None if it has not all of them.

    Methods of one group are compared under those corruptions of the group that all of them have.
    """
    cells = [cell for table in tables for cell in paper_table(table) if (cell.task, cell.model) == ("mm-vet", model)]
    scores: dict[Term, dict[Where, float]] = {term: term_scores(cells, term) for term in terms}
    total = 0.0
    for term in scores:
        partners = [own for other, own in scores.items() if (other.group, other.keep) == (term.group, term.keep)]
        shared = set.intersection(*(set(own) for own in partners))
        if not shared:
            return None
        total += 100 * term.weight * float(np.mean([scores[term][where] for where in shared]))
    return round(total, 6)


def term_scores(cells: Sequence[PaperCell], term: Term) -> dict[Where, float]:
    """The scores of a term by corruption and level."""
    corruption, _, rank = term.group.partition(" ")
    found = {
        (cell.corruption, cell.level): cell.value
        for cell in cells
        if (spec(cell), cell.keep) == (term.method, term.keep)
        and cell.metric in ("score", "mean_score")
        and belongs(cell.corruption, corruption)
    }
    if rank and found:
        levels = sorted(found, key=lambda where: where[1] or 0.0)
        return {where: found[where] for where in [levels[0] if rank == "1" else levels[-1]]}
    return found


def belongs(corruption: str, group: str) -> bool:
    if group == "noise":
        return corruption in NOISES
    if group == "other":
        return corruption not in (*NOISES, "clean", "all")
    return corruption == group or (group == "all" and corruption != "all")


def spec(cell: PaperCell) -> str:
    """A method as `results.spec` has it."""
    return " ".join([cell.method, *(f"{key}={plain(value)}" for key, value in cell.parameters.items())])


def table_value(table: str, metric: str, **where: float | str | None) -> float:
    """The one number of a table with this metric and these fields."""
    found = [
        cell.value
        for cell in paper_table(table)
        if cell.metric == metric and all(getattr(cell, name) == value for name, value in where.items())
    ]
    (value,) = found
    return value


def difference_at(terms: Iterable[Term], model: str, level: float) -> float:
    """As `contrast`, at one level of Gaussian noise, of methods that may have different budgets."""
    cells = [cell for cell in paper_table("onevision_gaussian") if (cell.model, cell.level) == (model, level)]
    scores = {(cell.method, cell.keep): cell.value for cell in cells}
    return round(100 * sum(term.weight * scores[term.method, term.keep] for term in terms), 6)


def salience_gain() -> float:
    """Return the gain of the salience for OneVision on clean images at k = 16, in points."""
    without = table_value("text", "score", model=ONEVISION, keep=16)
    return round(
        100 * (table_value("onevision_gaussian", "score", corruption="clean", keep=16, method="clustrs") - without), 6
    )


def overhead_ratio(keep: int) -> float:
    """The visual overhead of ClustRS in that of FasterVLM, each the middle of what is printed."""
    return round(_overhead("clustrs", keep) / _overhead("fastervlm", keep), 3)


def overhead_share(keep: int) -> float:
    """The visual overhead of ClustRS in per cent of an answer of 64 tokens."""
    return round(100 * _overhead("clustrs", keep) / table_value("text", "answer_64_tokens"), 3)


def _overhead(method: str, keep: int) -> float:
    ends = (table_value("overhead", f"{end}_overhead", method=method, keep=keep) for end in ("lowest", "highest"))
    return sum(ends) / 2
