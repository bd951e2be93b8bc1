"""From a record to a report: what is written."""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng
from recorded_run import CONFIG, METHODS, Row, failed, rows_of, write_run
from report_reading import Page, cells_of

from clustrs import tables
from clustrs.evaluation import metrics
from clustrs.evaluation.report import terminal_table, write_report
from clustrs.evaluation.report.summary import Reference
from clustrs.evaluation.results import Run, load_run
from clustrs.palette import color

FILES = ("report.html", "report.md", "report.tex", "report.csv")
FIGURES = ("report-tokens.pdf", "report-curves-1.pdf", "report-curves-2.pdf")


def test_a_single_seed_and_several(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> list[Row]:
        return [
            failed(row) if (row["item"], row["seed"]) in (("v1_0", 1), ("v1_1", 1), ("v1_1", 4)) else row
            for row in rows
        ]

    folder = write_run(tmp_path, change, seeds=[1, 4])
    write_report(folder)
    cells = cells_of(folder)
    assert len(cells) == 25 * 3
    for method, (name, level) in product(METHODS, (("clean", ""), ("gaussian", "0.5"), ("jpeg", "60"))):
        keep = "all" if method["name"] == "none" else str(method["keep"])
        text = f"{name}:{level}" if level else name
        rows = [row for row in change(rows_of({**CONFIG, "seeds": [1, 4]})) if row["method"] == method]
        own = [row for row in rows if row["corruption"] == text and row["score"] is not None]
        for seed, expected in (("1", 10), ("4", 11)):
            scores = [row["score"] for row in own if str(row["seed"]) == seed]
            cell = cells[method["name"], keep, name, level, seed]
            assert int(cell["n"]) == len(scores) == expected
            assert float(cell["mean"]) == pytest.approx(100 * sum(scores) / len(scores), abs=1e-6)
        both: dict[str, list[float]] = {}
        for row in own:
            both.setdefault(row["item"], []).append(row["score"])
        means = [sum(scores) / len(scores) for scores in both.values()]
        cell = cells[method["name"], keep, name, level, "all"]
        assert (cell["n"], cell["failed"], cell["missing"]) == ("11", "3", "0")
        assert float(cell["mean"]) == pytest.approx(100 * sum(means) / 11, abs=1e-6)
        assert float(cell["low"]) < float(cell["mean"]) < float(cell["high"])
    assert "averaged over 2 seeds" in (folder / "report.md").read_text()


@pytest.mark.figures
def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", lambda rows: rows[::-1])
    assert write_report(first) == first / "report.html"
    write_report(second)
    before = {name: (first / name).read_bytes() for name in (*FILES, *FIGURES)}
    write_report(first)
    for name in (*FILES, *FIGURES):
        assert (first / name).read_bytes() == before[name]
        assert (second / name).read_bytes() == before[name], "the order of the record must not matter"


def test_the_page_stands_by_itself(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path)).read_text()
    page = Page(text)
    assert page.open == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.outside == []
    script = text.split("<script>")[1].split("</script>")[0]
    assert page.tags.count("script") == 1
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in text
    assert "fetch" not in script
    assert "XMLHttpRequest" not in script
    assert "http://" not in text
    assert "https://" not in text
    assert page.tags.count("figure") == 3
    assert page.tags.count("svg") == 3 * (2 + 3), "two panels and three methods in the legend: tokens, two corruptions"
    assert len(set(page.ids)) == len(page.ids)
    for reference in re.findall(r'(?:url\(|href=")#([^)"]+)', text):
        assert reference in page.ids


def test_a_method_has_its_color_and_variants_their_lines(tmp_path: Path) -> None:
    methods = [{"name": "fastervlm", "keep": 4}, *({"name": "clustrs", "keep": 4, "tau": tau} for tau in (1.0, 2.0))]
    text = write_report(write_run(tmp_path, methods=methods)).read_text()
    legend = re.findall(r"<li data-key.*?</svg> (.*?)</li>", text)
    assert legend == ["FasterVLM", "ClustRS", "ClustRS tau=2"] * 3
    swatches = re.findall(r'<li data-key.*?color: (#\w+)".*?stroke-dasharray="(.*?)"', text)
    ours = color("clustrs")
    assert swatches == [(color("fastervlm"), ""), (ours, ""), (ours, "6 3")] * 3
    assert text.count(f'<g data-curve="1" style="color: {ours}">') == 2 + 2


def test_numbers_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    page = " ".join(" ".join(Page(write_report(folder).read_text()).text).split())
    markdown = (folder / "report.md").read_text()
    rows = rows_of(CONFIG)

    def scores(method: int, corruption: str) -> list[float]:
        found = [row for row in rows if row["method"] == METHODS[method] and row["corruption"] == corruption]
        return [row["score"] for row in sorted(found, key=lambda row: row["item"])]

    means = [100 * sum(scores(method, "gaussian:2")) / 12 for method in range(5)]
    line = next(line for line in markdown.splitlines() if line.startswith("| 2 | 4 |"))
    for mean in (means[0], means[1], means[3]):
        assert f" {mean:.1f} [" in line
        assert f"{mean:.1f}" in page

    kept_shares = [f"] {100 * means[i] / means[0]:.0f} % |" for i in (1, 3)]
    assert [line.count(share) for share in kept_shares] == [1 + (kept_shares[0] == kept_shares[1])] * 2
    assert "%" not in line.split("|")[3], "the unpruned model's own"

    section = markdown.split("**Means over levels**")[1]
    for title, names in (("JPEG", ("jpeg:30", "jpeg:60")), ("all corruptions", CONFIG["corruptions"][1:])):
        line = next(line for line in section.splitlines() if line.startswith(f"| {title} | 4 |"))
        for method, place in ((0, 3), (1, 4), (3, 5)):
            mean = 100 * sum(sum(scores(method, name)) for name in names) / len(names) / 12
            assert line.split("|")[place].strip("* ").startswith(f"{mean:.1f}")

    section = markdown.split("**Retention**")[1]
    line = next(line for line in section.splitlines() if line.startswith("| gaussian:2 | 4 |"))
    assert [f"{100 * means[i] / means[0]:.1f}" for i in (1, 3)] == re.findall(r"\d+\.\d", line)

    levels = {"gaussian": ("gaussian:0.5", "gaussian:2"), "jpeg": ("jpeg:60", "jpeg:30")}
    errors = {i: [sum(1 - sum(scores(i, c)) / 12 for c in names) for names in levels.values()] for i in (0, 1, 3)}
    wanted = [100 * sum(a / b for a, b in zip(errors[i], errors[0], strict=True)) / 2 for i in (1, 3)]
    line = next(line for line in markdown.splitlines() if line.startswith("| mCE | 4 |"))
    assert [f"{value:.1f}" for value in wanted] == re.findall(r"\d+\.\d", line)

    flips = [
        sum((a >= 0.5) != (b >= 0.5) for a, b in zip(scores(i, "clean"), scores(i, "jpeg:30"), strict=True)) / 0.12
        for i in (0, 1, 3)
    ]
    section = markdown.split("**Flip rate**")[1]
    line = next(line for line in section.splitlines() if line.startswith("| jpeg:30 | 4 |"))
    assert [f"{value:.1f}" for value in flips] == re.findall(r"\d+\.\d", line)

    kept = {(json.dumps(r["method"]), r["corruption"], r["item"]): set(r["kept"]) for r in rows}
    key = json.dumps(METHODS[3])
    overlaps = [len(kept[key, "clean", f"v1_{i}"] & kept[key, "jpeg:30", f"v1_{i}"]) / 4 for i in range(12)]
    section = markdown.split("**Overlap of kept tokens**")[1]
    line = next(line for line in section.splitlines() if line.startswith("| jpeg:30 | 4 |"))
    assert re.findall(r"\d+\.\d", line)[1] == f"{100 * sum(overlaps) / 12:.1f}"

    pairs = zip(scores(3, "clean"), scores(1, "clean"), strict=True)
    difference = 100 * sum(a - b for a, b in pairs) / 12
    section = markdown.split("## ClustRS minus its rivals")[1]
    assert "| corruption | ClustRS minus FasterVLM |" in section
    line = next(line for line in section.splitlines() if line.startswith("| clean |"))
    assert f"{difference:+.1f}" in line

    math = [row["score"] for row in rows if row["method"] == METHODS[3] and row["corruption"] == "clean"][1::2]
    line = next(line for line in markdown.splitlines() if line.startswith("| math (n 6) | 4 |"))
    assert f"{100 * sum(math) / 6:.1f}" in line.split("|")[5]


def test_an_incomplete_run_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lambda rows: [failed(rows[0]), *rows[1:150]])
    assert "Incomplete: 150 of 300 answers (50.0 %) are missing." in write_report(folder).read_text()
    markdown = (folder / "report.md").read_text()
    assert "1 answer failed" in markdown
    assert "| unpruned | all | 60 | 0 | 1 | 0 |" in markdown
    assert "| FasterVLM | 8 | 60 | 30 | 0 | 0 |" in markdown
    assert "| ClustRS | 4 | 60 | 60 | 0 | 0 |" in markdown
    assert "| broken image | 1 |" in markdown
    assert terminal_table(load_run(folder)).endswith("of 300 answers: 150 missing, 1 failed\n")
    cells = cells_of(folder)
    assert [cells["none", "all", "clean", "", "0"][name] for name in ("n", "failed", "missing")] == ["11", "1", "0"]
    cell = cells["clustrs", "8", "jpeg", "30", "0"]
    assert [cell[name] for name in ("n", "missing", "mean", "low", "high")] == ["0", "12", "", "", ""]


@pytest.mark.figures
@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [],
        lambda rows: [failed(row) for row in rows],
        lambda rows: [row for row in rows if row["item"] == "v1_4"],
        lambda rows: rows[:1],
        lambda rows: [{**row, "kinds": [], "score": 0.0} for row in rows],
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"methods": METHODS[:1]},
        {"methods": METHODS[1:]},
        {"corruptions": ["clean"]},
        {"corruptions": ["jpeg:30"], "seeds": [0, 1]},
        {"scale": 1.0},
    ],
)
def test_odd_records_still_give_a_report(
    change: Callable[[list[Row]], list[Row]], settings: Row, tmp_path: Path
) -> None:
    folder = write_run(tmp_path, change, **settings)
    assert Page(write_report(folder).read_text()).open == []
    text = "".join((folder / name).read_text() for name in FILES)
    assert not re.search(r"\b(nan|None|inf)\b", text.replace("limit", ""))
    assert terminal_table(load_run(folder))


def test_without_the_unpruned_model_nothing_is_relative_to_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, methods=METHODS[1:])
    text = write_report(folder).read_text()
    assert "Retention" not in text
    assert "shares of the unpruned model" not in text
    assert "mCE" not in text
    assert "Flip rate" in text


def paper_run(folder: Path, model: str, **settings: Any) -> Path:
    full = {"tau": 1.0, "clip": [0.1, 0.95], "shrink": True, "seed": 0}
    methods = [{"name": "fastervlm", "keep": 16}, {"name": "clustrs", "keep": 16, **full}]
    corruptions = ["gaussian:0.5", "cutout:0.1", "cutout:0.25", "cutout:0.4"]
    return write_run(folder, methods=methods, corruptions=corruptions, model=model, **settings)


def test_the_papers_numbers_stand_beside_ours(tmp_path: Path) -> None:
    folder = paper_run(tmp_path, "llava-hf/llava-1.5-7b-hf")
    text = write_report(folder).read_text()
    assert '<span class="paper">paper 24.2</span>' in text
    assert "another model" not in text
    markdown = (folder / "report.md").read_text()
    line = next(line for line in markdown.splitlines() if line.startswith("| 0.5 | 16 |"))
    assert re.findall(r"\(paper (.*?)\)", line) == ["21.8", "24.2"]
    line = next(line for line in markdown.splitlines() if line.startswith("| cutout | 16 |"))
    assert re.findall(r"\(paper (.*?)\)", line) == ["18.3", "21.4"]
    assert r"(paper 24.2)" in (folder / "report.tex").read_text()
    assert float(cells_of(folder)["clustrs", "16", "gaussian", "0.5", "0"]["paper"]) == pytest.approx(24.2)


def test_the_papers_numbers_are_not_for_every_model(tmp_path: Path) -> None:
    folder = paper_run(tmp_path, "mini-llava", scale=1.0)
    assert "paper 0" not in write_report(folder).read_text()
    assert cells_of(folder)["clustrs", "16", "gaussian", "0.5", "0"]["paper"] == ""
    text = write_report(folder, compare_with="llava-1.5-7b").read_text()
    assert '<span class="paper">paper 0.242</span>' in text
    assert "This run is of another model, mini-llava." in text
    with pytest.raises(ValueError, match=r"compare_with='gpt': the paper has numbers for llava-1.5-7b, "):
        write_report(folder, compare_with="gpt")


def test_a_table_for_the_terminal(tmp_path: Path) -> None:
    def score(row: Row) -> float:
        if row["method"]["keep"] == 8 or row["method"]["name"] == "fastervlm":
            return 0.25
        return 1.0 if row["method"]["name"] == "none" else float(int(row["item"].partition("_")[2]) % 2)

    def change(rows: list[Row]) -> list[Row]:
        return [
            {**row, "score": score(row)}
            for row in rows
            if row["method"]["name"] != "fastervlm" or row["corruption"] == "clean"
        ]

    run = load_run(write_run(tmp_path, change, corruptions=["clean", "jpeg:30"]))
    (half,) = metrics.estimates(np.array([[float(int(item.partition("_")[2]) % 2) for item in run.items]]))
    assert (half.low, half.high) == (0.25, 0.75)
    assert terminal_table(run) == (
        "corruption  keep     unpruned   fastervlm      clustrs\n"
        "------------------------------------------------------\n"
        "clean       4     100.0 ±0.0   25.0 ±0.0   50.0 ±25.0\n"
        "            8     100.0 ±0.0   25.0 ±0.0   25.0  ±0.0\n"
        "jpeg:30     4     100.0 ±0.0      \N{EN DASH}        50.0 ±25.0\n"
        "            8     100.0 ±0.0      \N{EN DASH}        25.0  ±0.0\n"
        "mean score (per cent); ± half of its 95 % interval; * clearly better than every other method there\n"
        "of 120 answers: 24 missing\n"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_variants_fit_the_terminal_and_are_labeled_by_what_differs(tmp_path: Path, width: int) -> None:
    ours: list[Row] = [{}, {"clip": [0, 0]}, {"tau": 2.0}, {"clip": [0, 0], "tau": 2.0}]
    methods = [{"name": "clustrs", "keep": keep, **changed} for changed in ours for keep in (4, 8)]
    text = terminal_table(load_run(write_run(tmp_path, methods=methods)), width=width)
    assert max(map(len, text.splitlines())) <= width
    for label in ("clustrs", "clustrs clip=[0,0]", "clustrs tau=2", "clustrs clip=[0,0] tau=2"):
        assert re.search(rf" {re.escape(label)}\s", text)
    assert " ".join(text.split()).endswith("* clearly better than every other method there")


def test_the_papers_numbers_in_the_terminal(tmp_path: Path) -> None:
    """Beside ours, from the table that the run reproduces, and only where they are for this model."""
    run = load_run(paper_run(tmp_path, "llava-hf/llava-1.5-7b-hf"))
    lines = terminal_table(run).splitlines()
    line = next(line for line in lines if line.startswith("gaussian:0.5"))
    assert re.findall(r"\((.*?)\)", line) == ["21.8", "24.2"]
    assert lines[-1].startswith('Numbers in brackets are those that "')
    assert lines[-1].endswith("prints for llava-1.5-7b in its main tables.")
    run = load_run(paper_run(tmp_path, "llava-hf/llava-1.5-7b-hf", reproduces="sensitivity_tau"))
    line = next(line for line in terminal_table(run).splitlines() if line.startswith("gaussian:0.5"))
    assert re.findall(r"\((.*?)\)", line) == ["24.0"]
    other = load_run(paper_run(tmp_path, "mini-llava"))
    assert "(24.2)" not in terminal_table(other)
    assert "(24.2)" in terminal_table(other, "llava-1.5-7b")


@pytest.mark.parametrize("better", [0, 1, 3])
def test_bold_is_clearly_better_than_every_other_method(tmp_path: Path, better: int) -> None:
    """Three methods: the first is right on `better` of 12 questions on which the second is wrong; the third never."""
    methods = [{"name": name, "keep": 4} for name in ("clustermeans", "clustrs", "random")]

    def change(rows: list[Row]) -> list[Row]:
        right = {"clustermeans": 6 + 2 * better, "clustrs": 6, "random": 0}
        return [
            {**row, "score": float(int(row["item"].partition("_")[2]) < right[row["method"]["name"]])} for row in rows
        ]

    folder = write_run(tmp_path, change, methods=methods, corruptions=["clean"])
    write_report(folder)
    section = (folder / "report.md").read_text().split("**Clean images**")[1]
    (line,) = (line for line in section.splitlines() if line.startswith("| clean | 4 |"))
    difference = np.r_[np.ones(2 * better), np.zeros(12 - 2 * better)]
    drawn = default_rng(1).choice(difference, (4000, 12)).mean(1)
    clear = bool(np.percentile(drawn, 2.5) > 0)
    assert clear == (better == 3)
    assert line.count("**") == 2 * clear
    assert ("*" in terminal_table(load_run(folder)).splitlines()[2]) == clear
    assert (
        f"keep 4: ClusterMeans{' and ClustRS' * (not better)} {100 * (6 + 2 * better) / 12:.1f}{'*' * clear}"
        in (folder / "report.html").read_text()
    )


def test_the_headline_is_chosen_on_one_half_and_measured_on_the_other(tmp_path: Path) -> None:
    """clustrs keeps everything on even questions and half on the others; fastervlm half on even ones and everything."""

    def score(row: Row, place: int) -> float:
        name, keep = row["method"]["name"], row["method"]["keep"]
        if name == "none":
            return 1.0
        good = (place % 2 == 0) == (name == "clustrs")
        return 1.0 if good and keep == 8 else 0.5

    def change(rows: list[Row]) -> list[Row]:
        places = {item: i for i, item in enumerate(sorted({row["item"] for row in rows}))}
        return [{**row, "score": score(row, places[row["item"]])} for row in rows]

    folder = write_run(tmp_path, change)
    page = write_report(folder).read_text()
    assert (
        '<p class="headline">ClustRS keeps 50 % of the unpruned score on clean images and 50 % on corrupted ones, with '
        "40 % of the visual tokens.</p>"
    ) in page
    assert "8 of 20 tokens an image. Method and budget were chosen on every second question (the fewest tokens " in page
    assert "measured on the 6 others: 95 % intervals [50, 50] and [50, 50]." in page
    few = write_report(write_run(tmp_path, lambda rows: [row for row in rows if row["item"] == "v1_4"])).read_text()
    assert "There are too few answers for a headline." in few
    without = write_report(write_run(tmp_path, methods=METHODS[1:])).read_text()
    assert "The unpruned model is not part of this run" in without


def test_methods_are_counted_as_methods(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path)).read_text()
    assert (
        "12 questions, 2 pruning methods, 2 budgets, 5 conditions, 1 seed, and the unpruned model; 300 answers" in text
    )


def test_the_fastest_method_at_each_budget(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    spent = [(METHODS[0], 90.0), (METHODS[1], 30.0), (METHODS[3], 20.0), (METHODS[2], 60.0)]
    times = [[method, {"vision": 5.0, "selection": 5.0, "prefill": ms, "decode": 99.0}] for method, ms in spent]
    (folder / "latency.json").write_text(json.dumps({"machine": "CPU", "repeats": 3, "milliseconds": times}))
    text = write_report(folder).read_text()
    assert "<li>keep 4: ClustRS 30 ms (unpruned 100 ms, 3.3 x)</li>" in text
    assert "<li>keep 8: FasterVLM 70 ms (unpruned 100 ms, 1.4 x)</li>" in text


def test_tokens_stand_beside_scores(tmp_path: Path) -> None:
    write_report(write_run(tmp_path))
    markdown = (tmp_path / "report.md").read_text()
    section = markdown.split("**Cost and score**")[1]
    line = next(line for line in section.splitlines() if line.startswith("| ClustRS | 8 |"))
    rows = [row["score"] for row in rows_of(CONFIG) if row["method"] == METHODS[4] and row["corruption"] == "clean"]
    assert line.split(" | ")[2:5] == ["8", "40 %", f"{100 * sum(rows) / 12:.1f}"]
    assert "clustrs report RUN --latency 10" in markdown


def test_measured_times_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    times = [
        [METHODS[0], {"vision": 5.0, "prefill": 40.25, "kv_bytes": 3 * 2**19}],
        [METHODS[3], {"vision": 5.0, "selection": 1.5}],
    ]
    (folder / "latency.json").write_text(json.dumps({"machine": "CPU", "repeats": 3, "milliseconds": times}))
    write_report(folder)
    section = (folder / "report.md").read_text().split("**Cost and score**")[1]
    assert "medians of 3 answers, one at a time, measured on CPU" in (folder / "report.md").read_text()
    cells = {line.split(" | ")[0]: line.split(" | ")[-5:] for line in section.splitlines() if " | " in line}
    assert cells["| unpruned"] == ["5.0", "\N{EN DASH}", "40.2", "\N{EN DASH}", "1.50 |"]
    (folder / "latency.json").write_text('{"machine": 3}')
    with pytest.raises(ValueError, match=r"latency.json': Expected .*make it again, or remove it"):
        write_report(folder)


PIXEL = "data:image/png;base64,iVBORw0KGgo="


def test_examples_are_shown_in_the_page_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    shown = [{"method": "clustrs", "text": "<b>3</b>", "right": True, "drawing": PIXEL}]
    example = {"question": "Which digit?", "answer": "3", "where": "jpeg:30", "shown": shown}
    (folder / "examples.json").write_text(json.dumps([example]))
    text = write_report(folder).read_text()
    page = Page(text)
    assert page.drawings == [PIXEL]
    assert page.open == []
    assert "&lt;b&gt;3&lt;/b&gt;" in text
    assert "Where methods disagree" not in (folder / "report.md").read_text()
    assert "Where methods disagree" not in (folder / "report.tex").read_text()
    shown[0]["drawing"] = "https://example.org/pixel.png"
    (folder / "examples.json").write_text(json.dumps([example]))
    with pytest.raises(
        ValueError, match=r"drawing must be an image as a data URI, got 'https://example.org/pixel.png'"
    ):
        write_report(folder)


def test_contents_date_and_versions(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, started="2026-03-01", torch="2.13.0")).read_text()
    assert "Started on 2026-03-01 (UTC), with clustrs 0.1.0, torch 2.13.0." in text
    titles = re.findall(r'<(section|details><summary)><h2 id="(.*?)">(.*?)</h2>', text)
    assert titles[0] == ("section", "section-1", "Summary")
    assert {tag for tag, *_ in titles[1:]} == {"details><summary"}, "everything else is folded"
    assert len(titles) == text.count("<h2")
    assert "Started on an unknown day" in write_report(write_run(tmp_path)).read_text()


def test_marks_have_their_numbers_without_a_script(tmp_path: Path) -> None:
    """A mark at every level of every curve, at the tick, with mean and interval as its title."""
    text = write_report(write_run(tmp_path)).read_text()
    panel = text.split('<div class="panel">')[3].split("</div>")[0]
    ticks = re.findall(r'data-x="(.*?)"', panel)
    marks = re.findall(r'data-tick="(\d)" transform="translate\((\S+) \S+\)" d=".*?"><title>(.*?)</title>', panel)
    assert len(ticks) == 3
    assert len(marks) == 3 * 3
    assert all(x == ticks[int(tick)] for tick, x, _ in marks)
    rows = [row["score"] for row in rows_of(CONFIG) if row["method"] == METHODS[3] and row["corruption"] == "clean"]
    assert any(words.startswith(f"ClustRS: {100 * sum(rows) / 12:.1f} [") for _, _, words in marks)


def test_nothing_is_marked_as_best_where_best_means_nothing(tmp_path: Path) -> None:
    write_report(write_run(tmp_path))
    markdown = (tmp_path / "report.md").read_text()
    for title in ("Retention", "Corruption error", "Flip rate", "Overlap of kept tokens"):
        table = markdown.split(f"**{title}**")[1].split("\n\n")[1]
        assert "**" not in table


@pytest.mark.figures
def test_tables_for_papers(tmp_path: Path) -> None:
    write_report(write_run(tmp_path))
    tex = (tmp_path / "report.tex").read_text()
    labels = re.findall(r"\\label\{(.*?)\}", tex)
    assert len(set(labels)) == len(labels)
    assert {"tab:scores-gaussian-noise", "fig:curves-1"} <= set(labels)
    assert tex.count(r"\begin{table}") == tex.count(r"\toprule") == tex.count(r"\bottomrule")
    assert "Mean score (per cent) of mini-llava on mm-vet under Gaussian noise, 12 questions" in tex
    assert tex.count(r"\clearpage") == 0
    assert all((tmp_path / name).read_bytes().startswith(b"%PDF") for name in FIGURES)


def test_without_matplotlib_the_tables_are_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    text = write_report(write_run(tmp_path)).read_text()
    assert text.count('<div class="panel"><svg') == 6, "the page draws its curves itself"
    assert "Retention" in text
    assert not list(tmp_path.glob("*.pdf"))
    assert r"\IfFileExists{report-curves-1.pdf}" in (tmp_path / "report.tex").read_text()


def test_plugin_adds_its_numbers_text_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract of the entry-point group clustrs.report_sections."""

    def plugin(run: Run, compare_with: str | None) -> Reference:
        table = tables.Table("Own table", ("x",), ("y",), (tables.Row(("a",), (tables.Value("7"),)),))
        return Reference(
            f'Numbers marked "paper" are made up for {compare_with}.',
            lambda method, corruption, level: 0.123 if (method.name, level) == ("clustrs", 30) else None,
            lambda summary: [table],
        )

    entry = EntryPoint("made-up", "nowhere:plugin", "clustrs.report_sections")
    monkeypatch.setattr(EntryPoint, "load", lambda self: plugin)
    monkeypatch.setattr("clustrs.evaluation.report.summary.plugin_entries", lambda group: (entry,))
    folder = write_run(tmp_path, model="not-of-the-paper")
    write_report(folder)
    text = (folder / "report.md").read_text()
    assert 'Numbers marked "paper" are made up for None.' in text
    assert text.count("(paper 12.3)") == 2
    assert "**Own table**\n\n| x | y |" in text
    assert "(12.3)" in terminal_table(load_run(folder))
