"""A run is compared with the table that it reproduces, and with no other."""

from itertools import combinations, product
from pathlib import Path

import pytest

from clustrs.cli.base import parse
from clustrs.cli.evaluate import configuration
from clustrs.evaluation.config import Config, parse_corruption
from clustrs.pruners import from_dict
from clustrs_paper.tables import (
    MAIN,
    SCORE_TABLES,
    SERIES,
    TABLES,
    PaperCell,
    PaperReference,
    RunCell,
    find_reference,
    paper_table,
)


def ready(table: str, *words: str) -> Config:
    return configuration(parse(["eval", "--config", f"paper/{table.replace('_', '-')}", *words]))


def cells_of(config: Config) -> list[RunCell]:
    """Every cell of the run, with methods described in full as a record has them."""
    cells: list[RunCell] = []
    for stored in config.methods:
        for text in config.corruptions:
            corruption = parse_corruption(text)
            name, level = (corruption.name, corruption.level) if corruption else ("clean", None)
            cells.append((stored, None if stored["name"] == "none" else stored["keep"], name, level))
    return cells


def expected(cell: PaperCell) -> float:
    return round(cell.value / 100, 6) if cell.unit == "per cent" else cell.value


def looked_up(reference: PaperReference, cell: PaperCell) -> float | None:
    """The number that the look-up gives for a cell, asked for as a run would: with all parameters of the method."""
    keep = 16 if cell.keep is None else cell.keep
    method = from_dict({"name": cell.method, **cell.parameters, "keep": keep}).to_dict()
    if cell.corruption == "all":
        return reference.mean(method)
    find = reference.gain if cell.metric == "gain" else reference.score
    return find(method, cell.keep, cell.corruption, cell.level)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("table", SCORE_TABLES)
def test_every_number_of_the_table_that_a_run_reproduces(table: str, said: bool) -> None:
    """Whether the configuration names its table, or only its cells tell."""
    config = ready(table)
    assert config.reproduces == table
    reference = find_reference(config.task, config.model, cells_of(config), table if said else None)
    assert reference is not None
    assert table in reference.tables
    cells = paper_table(table)
    assert [looked_up(reference, cell) for cell in cells] == [expected(cell) for cell in cells]


def test_all_numbers_are_covered() -> None:
    """The score tables above, and the two that no run reproduces."""
    counts = {name: len(paper_table(name)) for name in TABLES if name != "text"}
    assert sum(counts.values()) == 614
    assert set(counts) == {*SCORE_TABLES, "rank_instability", "overhead"}
    assert sum(counts[name] for name in SCORE_TABLES) == 590


def test_every_cell_of_a_run_is_from_one_series() -> None:
    """No series has a cell twice, so what is shown cannot depend on an order of look-up."""
    for tables in SERIES:
        keys = [
            (
                cell.task,
                cell.model,
                cell.method,
                str(cell.parameters),
                cell.keep,
                cell.corruption,
                cell.level,
                cell.metric,
            )
            for table in tables
            for cell in paper_table(table)
            if cell.method
        ]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("table", "differing"), [("ablation", 17), ("sensitivity_tau", 11), ("sensitivity_clip", 10)])
def test_tables_that_measure_cells_again_differ(table: str, differing: int) -> None:
    """How many numbers a look-up through all tables in a row would take from another one."""
    from clustrs_paper.tables import paper_value

    cells = [cell for cell in paper_table(table) if cell.metric == "score"]
    values = [
        paper_value(
            cell.task, cell.model, {"name": cell.method, **cell.parameters}, cell.keep, cell.corruption, cell.level
        )
        for cell in cells
    ]
    assert sum(value != cell.value for value, cell in zip(values, cells, strict=True)) == differing


def test_a_run_cut_short_keeps_its_table() -> None:
    """ClustRS alone is in four tables; the configuration says which one is meant."""
    config = ready("ablation", "--methods", "clustrs", "--keep", "16", "--corrupt", "gaussian:0.5")
    (cell,) = cells_of(config)
    named = find_reference(config.task, config.model, [cell], config.reproduces)
    unnamed = find_reference(config.task, config.model, [cell])
    assert named is not None
    assert unnamed is not None
    assert (named.score(*cell), unnamed.score(*cell)) == (0.272, 0.242)
    assert (named.tables, unnamed.tables) == (("ablation",), MAIN)


@pytest.mark.parametrize("table", ["ablation", "sensitivity_tau", "sensitivity_clip"])
def test_part_of_a_table_is_still_that_table(table: str) -> None:
    """All variants at some of the budgets and conditions, as a study with options runs them."""
    cells = [cell for cell in cells_of(ready(table)) if cell[1] is not None]
    conditions = list(dict.fromkeys(cell[2:] for cell in cells))
    for size, keep in product(range(1, len(conditions) + 1), (16, 50, 144)):
        for chosen in combinations(conditions, size):
            part = [cell for cell in cells if cell[1] == keep and cell[2:] in chosen]
            reference = find_reference("mmvet", "llava-1.5-7b", part)
            assert reference is not None
            assert reference.tables == (table,)


def test_what_the_paper_has_nothing_on() -> None:
    cell: RunCell = ("clustrs", 16, "clean", None)
    assert find_reference("mmvet", "mini-llava", [cell]) is None
    assert find_reference("scenes", "llava-1.5-7b", [cell]) is None
    reference = find_reference("mmvet", "llava-1.5-7b", [cell])
    assert reference is not None
    assert reference.score("clustrs", 0.5, "clean", None) is None
    assert reference.score("clustrs tau=2", 16, "clean", None) is None
    assert reference.mean("clustrs") is None
    with pytest.raises(ValueError, match="reproduces must be one of 'mmvet_gaussian', "):
        find_reference("mmvet", "llava-1.5-7b", [cell], "overhead")
    with pytest.raises(ValueError, match=r"reproduces must be one of .*, got 'ablatoin'.*did you mean 'ablation'"):
        find_reference("mmvet", "llava-1.5-7b", [cell], "ablatoin")


def test_the_tables_need_only_the_methods() -> None:
    from clustrs_paper import tables

    for room in ("evaluation", "studies", "cli"):
        assert f"clustrs.{room}" not in Path(tables.__file__).read_text()
