"""A report replaces its files together or not at all, and nothing in a record does harm: formulas, markup, size."""

import csv
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from recorded_run import CONFIG, METHODS, Row, failed, large_run, rows_of, write_run
from report_reading import Page, cells_of

from clustrs.evaluation.report import replace_files, terminal_table, write_report
from clustrs.evaluation.report.document import TEMPLATES
from clustrs.evaluation.results import load_run
from clustrs.tables import for_markdown, for_spreadsheet, for_tex, plain

FILES = ("report.html", "report.md", "report.tex", "report.csv")
FIGURES = ("report-tokens.pdf", "report-curves-1.pdf", "report-curves-2.pdf")


class Broken(Exception):
    pass


def without_disk(monkeypatch: pytest.MonkeyPatch, function: str, fails_at: int) -> None:
    """Make a function of `os` fail when it is called for the `fails_at`-th time."""
    real, calls = getattr(os, function), count(1)

    def limited(*arguments: Any) -> Any:
        if next(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, function, limited)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("fails_at", [1, 2, 4])
@pytest.mark.parametrize("before", [FILES, FILES[:2], ()])
def test_all_files_are_replaced_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, fails_at: int, before: tuple[str, ...]
) -> None:
    for name in before:
        (tmp_path / name).write_text(f"old {name}")
    names = {path.name for path in tmp_path.iterdir()}
    contents = {name: f"new {name}".encode() for name in FILES}
    without_disk(monkeypatch, function, fails_at)
    with pytest.raises(ValueError, match=r"report.*' could not be written: No space left on device$"):
        replace_files(tmp_path, contents)
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [(tmp_path / name).read_text() for name in before] == [f"old {name}" for name in before]
    replace_files(tmp_path, contents)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


@pytest.mark.parametrize("renderer", ["scores.csv_table", "document.latex", "document.markdown", "document.page"])
def test_a_crash_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renderer: str) -> None:
    def crash(*_: Any) -> str:
        raise Broken

    folder = write_run(tmp_path)
    write_report(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    write_run(tmp_path, lambda records: records[:-1])
    monkeypatch.setattr(f"clustrs.evaluation.report.{renderer}", crash)
    with pytest.raises(Broken):
        write_report(folder)
    after = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path for path in before if before[path] != after[path]} == {folder / "answers.jsonl"}
    assert before.keys() == after.keys()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (write_run(tmp_path) / "report.tex").mkdir()
    with pytest.raises(ValueError, match=r"report.tex' could not be written: Is a directory$"):
        write_report(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "answers.jsonl", "report.tex"}


FORMULAS = ["=1+1", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n@x", "  =1", "a;=1", "\uff1d1"]


@pytest.mark.parametrize("formula", FORMULAS)
def test_spreadsheets_run_nothing(formula: str, tmp_path: Path) -> None:
    methods = [{"name": formula, "keep": 4}, {"name": "clustrs", "keep": 4, formula: formula}]
    folder = write_run(tmp_path, methods=methods, corruptions=["clean", f"{formula}:1"], task=formula, model=formula)
    write_report(folder)
    with (folder / "report.csv").open(newline="") as file:
        for cell in (cell for row in csv.reader(file) for cell in row):
            parts = [part.lstrip() for part in re.split(r"[;\t]", cell)]
            assert not any(part.startswith(tuple("=+-@\uff1d")) for part in parts), cell
            assert cell.isprintable()
    parameters = [json.loads(row["parameters"]) for row in cells_of(folder).values()]
    assert {} in parameters


def test_numbers_are_not_taken_for_formulas() -> None:
    assert [for_spreadsheet(text) for text in ("16", "0.5", "a-b", "a = b", "")] == ["16", "0.5", "a-b", "a = b", ""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"items": 10**400}, "items must be .* got 1000"),
        ({"scale": 10**400}, "scale must be .* got 1000"),
        ({"methods": [{"name": "clustrs", "keep": 10**400}]}, "keep must be .* got 1000"),
        ({"corruptions": ["gaussian:" + "9" * 400]}, "must be clean or NAME:LEVEL"),
        ({"seeds": [0, 10**400, "x"]}, "seeds must be a list of int"),
        ({"methods": [METHODS[1]] * 30_000}, "two of them are the same"),
        ({"methods": [{"name": "grid", "keep": k} for k in range(1, 4000)], "seeds": list(range(4000))}, "a grid of"),
    ],
)
def test_huge_numbers_are_one_line(settings: Row, message: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    records = [{**record, "method": {"name": "grid", "keep": 1}, "corruption": "clean"} for record in rows_of(CONFIG)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:12]))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    with pytest.raises(ValueError, match=message) as caught:
        write_report(folder)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.figures
def test_huge_seeds_and_parameters_do_no_harm(tmp_path: Path) -> None:
    methods = [{"name": "clustrs", "keep": 4, "tau": 10**400}, {"name": "clustrs", "keep": 4, "tau": 1e300}]
    folder = write_run(tmp_path, methods=methods, seeds=[0, 10**400], corruptions=["clean", "gaussian:1e300"])
    text = write_report(folder).read_text()
    assert f"ClustRS tau={10**400}" in text
    assert ("clustrs tau=1e+300", "4", "gaussian", "1e+300", str(10**400)) in cells_of(folder)


def test_deep_nesting_is_one_line(tmp_path: Path) -> None:
    for depth in (800, 900, 950, 980, 990, 5_000, 100_000):
        deep = '{"a":' * depth + "0" + "}" * depth
        folder = write_run(tmp_path)
        config = json.dumps({**CONFIG, "methods": [{"name": "clustrs", "keep": 4, "deep": "DEEP"}]})
        (folder / "config.json").write_text(config.replace('"DEEP"', deep))
        with pytest.raises(ValueError, match=r"not JSON|nested too deeply|not in config.json"):
            load_run(folder)


def test_many_kinds_are_cut_short(tmp_path: Path) -> None:
    def change(records: list[Row]) -> list[Row]:
        return [{**r, "kinds": [f"own {r['item']} {i}" for i in range(50)] + ["common"]} for r in records]

    folder = write_run(tmp_path, change)
    write_report(folder)
    markdown = (folder / "report.md").read_text()
    assert "Of 601 kinds the 100 with the most questions are shown." in markdown
    assert len(set(re.findall(r"^\| (own.*?) \(n 1\) \|", markdown, flags=re.MULTILINE))) == 99
    assert "| common (n 12) | 4 |" in markdown
    assert "kinds the" not in write_report(write_run(tmp_path)).read_text()


MEASURE = """
import resource, sys
from pathlib import Path
from clustrs.evaluation.report import write_report
write_report(Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak_memory(folder: Path) -> int:
    """Megabytes that it takes to write a report."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_memory_of_a_report(tmp_path: Path) -> None:
    """20,000 records more take less than 1 KB each with all that the statistics need, though there are 10,000 kinds."""
    small = peak_memory(large_run(tmp_path / "small", items=1_050))
    large = peak_memory(large_run(tmp_path / "large", items=2_050, kinds=10_000))
    assert large - small < 20


@pytest.mark.slow
def test_memory_of_a_judged_report(tmp_path: Path) -> None:
    """Every answer has a text and a verdict of its own."""
    small = peak_memory(large_run(tmp_path / "small", items=1_050, judged=True))
    large = peak_memory(large_run(tmp_path / "large", items=2_050, judged=True))
    assert large - small < 20


HOSTILE = "</pre><script>alert('x')</script>&\\end{document}$x_1^2%#~{}|`**[a](javascript:b)\n\x1b[31m\u202e\ud800"


@pytest.mark.figures
def test_strings_of_the_record_do_no_harm(tmp_path: Path) -> None:
    methods = [METHODS[0], *({"name": HOSTILE, "keep": 4, HOSTILE: value} for value in (HOSTILE, "b")), METHODS[3]]

    def change(rows: list[Row]) -> list[Row]:
        rows = [{**row, "item": row["item"] + HOSTILE, "kinds": [HOSTILE]} for row in rows]
        return [failed(rows[0], HOSTILE), *rows[1:]]

    settings: Row = {"task": HOSTILE, "model": HOSTILE, "corruptions": ["clean", f"{HOSTILE}:0.5"], "clustrs": HOSTILE}
    folder = write_run(tmp_path, change, methods=methods, **settings)
    text = write_report(folder).read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags.count("script") == 1, "our own"
    assert page.outside == []
    assert text.count("<script") == 1
    assert "\x1b" not in text
    assert "\u202e" not in text
    tex = (folder / "report.tex").read_text()
    assert tex.count(r"\end{document}") == 1
    bare = re.sub(r"\\[\\{}$&#%_]", "", tex)
    depth = 0
    for character in bare:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert not re.search(r"[#%^_]", bare.replace("{%\n", "").replace(r"{!}{%", ""))
    assert all(line.count("$") % 2 == 0 for line in bare.splitlines())
    markdown = (folder / "report.md").read_text()
    outside = re.sub(r"```json\n.*?\n```", "", markdown, flags=re.DOTALL)
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\[a", outside)
    tables = [line for line in outside.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert all(widths[i] == widths[i - 1] for i, line in enumerate(tables) if line.startswith("| ---"))
    assert len(cells_of(folder)) == 8
    assert not set("\x1b\u202e\ud800") & set(terminal_table(load_run(folder)))


def test_escaping() -> None:
    assert plain("a\n\tb\x00\ud800") == "a  b\ufffd\ufffd"
    html = TEMPLATES.from_string("{{ text }}").render(text="<a b=\"c\" d='e'>&\n\x00")
    assert html == "&lt;a b=&#34;c&#34; d=&#39;e&#39;&gt;&amp; \ufffd"
    assert for_markdown("a|b*_<x>&[y](z)") == r"a\|b\*\_&lt;x&gt;&amp;\[y\](z)"
    assert for_tex(r"50 % of \x_{1} & $é漢") == r"50 \% of \textbackslash{}x\_\{1\} \& \$é?"
    assert for_tex("[*]~^") == r"{[}{*}{]}\textasciitilde{}\textasciicircum{}"


@pytest.mark.figures
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
@pytest.mark.parametrize("hostile", [False, True])
def test_latex_compiles(tmp_path: Path, hostile: bool) -> None:
    settings: Row = {"task": HOSTILE, "model": HOSTILE} if hostile else {}
    write_report(write_run(tmp_path, **settings))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    (pages,) = re.findall(rb"Output written on report.pdf \((\d+) page", done.stdout)
    assert int(pages) <= 8
