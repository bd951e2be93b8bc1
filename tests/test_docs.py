"""The examples in the documentation run and print what they say."""

import csv
import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / ".github" / "pull_request_template.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted == page.read_text().count("\n>>> ")


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_numbers_in_the_readme_are_those_of_the_stored_run() -> None:
    text = (ROOT / "README.md").read_text()
    with (ROOT / "docs" / "results" / "scenes-k16.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row in rows:
        low, high = float(row["low"]), float(row["high"])
        assert f"{float(row['mean']):.1f} ({low:.1f} to {high:.1f})" in text, row


def test_the_benchmark_of_servers_in_the_docs_is_the_stored_one() -> None:
    from benchmarks.serving import markdown

    stored = json.loads((ROOT / "docs" / "results" / "serving.json").read_text())
    page = (ROOT / "docs" / "serving.md").read_text()
    for table in markdown(stored).strip().split("\n\n")[1:]:
        assert table in page


def test_the_benchmark_of_edge_runtimes_in_the_docs_is_the_stored_one() -> None:
    pytest.importorskip("onnxruntime")
    from benchmarks.edge import precision_table, timing_table

    stored = json.loads((ROOT / "docs" / "results" / "edge.json").read_text())
    page = (ROOT / "docs" / "edge.md").read_text()
    assert timing_table(stored["rows"]) in page
    assert precision_table(stored["precisions"]) in page


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def commands(page: Path) -> list[str]:
    """The lines of a page that call `clustrs`, without the explanations beside them."""
    text = re.sub(r" \\\n\s+", " ", page.read_text())
    lines = re.findall(r"^    (clustrs (?!at k = |slower than ).*)$", text, re.M)
    return [re.split(r"\s{3,}|\s+#\s", line)[0] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Every command has options that exist, with values that they take."""
    from clustrs.cli.app import parse

    for line in commands(page):
        if "..." not in line:
            assert parse(shlex.split(line)[1:]) is not None, line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-steps.md", "compare.md"])
def test_commands_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newcomer types works, one command after the other."""
    from clustrs.cli import main

    monkeypatch.chdir(tmp_path)
    listed = commands(ROOT / "docs" / name)
    assert listed
    for line in listed:
        assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    client(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "ClustRS      16 tokens: 3" in printed
    assert "50 tokens kept" in printed


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and references to the API are right; nothing on a page is fetched from elsewhere."""
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert [address for address in fetched if "canonical" not in address] == [], page
