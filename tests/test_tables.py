"""The table type: what it prints fits a terminal, and every variant keeps its label."""

from typing import Any

import pytest

from clustrs import ClustRS, NoPruning
from clustrs.cli import base
from clustrs.cli.ask import answers_table, print_answers
from clustrs.models.ask import Answer, Seconds
from clustrs.pruners import variant_labels
from clustrs.tables import NOTHING, Row, Table, Value, to_csv

LABELS = ("unpruned", "clustrs", "clustrs clip=[0,0]", "clustrs distance=euclidean shrink=false", "divprune", "tome")


def means(columns: tuple[str, ...], budgets: tuple[str, ...] = ("16", "50", "144")) -> Table:
    """A table of means as the report has them: the number tells its place."""
    rows = []
    for i, corruption in enumerate(("clean", "gaussian:0.5", "salt_pepper:0.1")):
        for j, budget in enumerate(budgets):
            values = [
                Value(f"{i}{j}.{k}", "±0.1", paper="9.9" if k else "", strong=k == 1) for k in range(len(columns))
            ]
            rows.append(Row((corruption, budget), tuple(values), opens=j == 0))
    return Table("", ("corruption", "keep"), columns, tuple(rows))


@pytest.mark.parametrize("width", [50, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("budgets", [("16",), ("16", "50", "144"), tuple(map(str, range(1, 9)))])
def test_fits_the_terminal_and_shows_every_number_and_label(width: int, count: int, budgets: tuple[str, ...]) -> None:
    table = means(LABELS[:count], budgets)
    text = table.terminal(width)
    assert max(map(len, text.splitlines())) <= width
    for row in table.rows:
        for value in row.values:
            assert f"{value.text} ±0.1{'*' if value.strong else ''}" in text
    assert width < 80 or all(label in text for label in LABELS[:count])


def test_too_wide_table_is_transposed() -> None:
    table = means(LABELS)
    whole, narrow = table.terminal(), table.terminal(120)
    assert whole.splitlines()[0].split() == ["corruption", "keep", *" ".join(LABELS).split()]
    assert narrow.splitlines()[0].split() == ["corruption", "method", "keep", "16", "keep", "50", "keep", "144"]
    assert len(narrow.splitlines()) == 2 + 3 * len(LABELS)
    (first, *_) = [line.split() for line in narrow.splitlines() if "clip=[0,0]" in line]
    assert first == ["clustrs", "clip=[0,0]", "00.2", "±0.1", "(9.9)", "01.2", "±0.1", "(9.9)", "02.2", "±0.1", "(9.9)"]


def test_transposing_twice_gives_the_same_numbers() -> None:
    table = Table("", ("method",), ("a", "b"), tuple(Row((m,), (Value(m + "1"), Value(m + "2"))) for m in "xyz"))
    turned = table.transposed()
    assert turned.heads == ("method",)
    assert turned.columns == ("x", "y", "z")
    assert [row.values[2].text for row in turned.rows] == ["z1", "z2"]
    back = turned.transposed()
    assert (back.columns, back.rows) == (table.columns, table.rows)


def test_budget_that_a_group_lacks_is_a_dash() -> None:
    table = means(LABELS[:2])
    partial = Table("", table.heads, table.columns, table.rows[:-1])
    assert partial.transposed().rows[-1].values[-1] == NOTHING


def test_control_characters_and_long_headings_do_not_break_the_layout() -> None:
    row = Row(("\x1b[31m" + "very long " * 20, "16"), (Value("1.0"),))
    text = Table("", ("corruption", "keep"), ("a\nb" * 30,), (row,)).terminal(80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "1.0" in text


def answer(text: str, decode: float = 0.2) -> Answer:
    image: Any = None
    return Answer(text, 576, 16, 3, Seconds(0.1, 0.01, 0.02, 0.3, decode, decode / 2), image)


def test_comparison_has_units_a_total_and_no_selection_of_the_unpruned_model() -> None:
    heads, rows = answers_table([NoPruning(), ClustRS(keep=16)], [answer("a cat"), answer("a dog", decode=0.0)])
    assert heads == [
        *("method", "tokens", "vision ms", "selection ms", "prefill ms", "decode/token ms", "total ms", "x faster"),
        "answer",
    ]
    assert rows == [
        ["none", "16/576", "100.0", "-", "300.0", "100.0", "600.0", "1.00", "a cat"],
        ["clustrs", "16/576", "100.0", "30.0", "300.0", "0.0", "430.0", "1.40", "a dog"],
    ]
    assert answers_table([ClustRS(keep=16)], [answer("a dog")])[1][0][-2] == "-", "nothing to compare with"


@pytest.mark.parametrize("width", [80, 120])
def test_comparison_of_variants_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times and answers have a table each; no number is broken."""
    monkeypatch.setattr(base, "is_rich", lambda stream: True)
    monkeypatch.setenv("COLUMNS", str(width))
    methods = [NoPruning(), ClustRS(keep=16), ClustRS(keep=16, clip=(0, 0))]
    sentence = "The image shows a cat that sits on a mat and looks into the camera, next to a dog and two birds."
    print_answers(methods, [answer(sentence)] * 3)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.count("16/576") == 3
    assert (text.count(" 600.0 "), text.count(" 630.0 ")) == (1, 2)
    assert " ".join(text.split()).count("camera") == 3
    assert variant_labels(methods) == ["none", "clustrs", "clustrs clip=[0,0]"]
    assert all(label in " ".join(text.split()) for label in variant_labels(methods))


def test_csv_runs_no_formula_and_keeps_numbers() -> None:
    text = to_csv([("=1+1", "-2", "-2+3", "1e-05", 7), ("a;=b", "+x", "\x1b@", "", -0.5)])
    assert text == "'=1+1,-2,'-2+3,1e-05,7\na;'=b,'+x,\ufffd@,,-0.5\n"
