"""`clustrs eval`, `study`, `ask` and `compare` on a saved model of every family, through the command's own entry."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny_models import BUILDERS, SAME_ADAPTER

from clustrs import list_methods
from clustrs.models.adapters.base import list_model_types

KEEP = 6
GAUSSIAN = ("clean", "gaussian:0.5")
STUDIES: dict[str, list[Any]] = {
    "stability": ["IMAGES", "--keep", KEEP, "--top", 3, "--levels", 1, "--methods", "clustrs", "fastervlm"],
    "manifold": ["IMAGES", "--keep", KEEP, "--levels", 1, "--methods", "clustrs", "divprune", "--no-umap"],
    "movement": ["IMAGES", "--keep", KEEP],
    "overhead": ["IMAGES", "--keep", KEEP, "--repeats", 1, "--new-tokens", 2, 3, "--methods", "clustrs", "visionzip"],
    "denoising": ["IMAGES", "--keep", KEEP, "--levels", 1],
    "ablation": ["TASK", "--keep", KEEP, "--levels", 1, "--limit", 2],
    "sensitivity": ["TASK", "--keep", KEEP, "--corrupt", "clean", "--parameters", "centroid", "--limit", 2],
    "variants": ["TASK", "--keep", KEEP, "--corrupt", "clean"],
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of saved models, each built once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            BUILDERS[family](made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions about a wide and a tall image, which families of dynamic size cut up differently."""
    root = tmp_path_factory.mktemp("task")
    rows = []
    for name, (height, width), questions in (("wide", (40, 60), 2), ("tall", (64, 40), 1)):
        tiny_models.make_image(height, width).save(root / f"{name}.png")
        rows += [
            {"id": f"{name}-{i}", "image": f"{name}.png", "question": f"Why {i}?", "answer": "x"}
            for i in range(questions)
        ]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


DRAWN = ("llava", "internvl", "qwen3_vl")
"""Families whose figures are rendered, which takes longer than everything that differs between families: one crop,
several, and images of any size. For the others a figure is made, and saved as a few bytes."""
GRIDS = ("ablation", "sensitivity", "variants")
"""Studies that are evaluations, as `test_eval` makes in every family."""


@pytest.fixture
def quick_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was saved without being rendered."""
    from matplotlib.figure import Figure

    saved: list[Any] = []

    def savefig(figure: Figure, to: Any, **_: Any) -> None:
        assert figure.get_axes()
        saved.append(to)
        if isinstance(to, Path):
            to.write_bytes(b"figure")
        else:
            to.write(b"figure")

    if request.getfixturevalue("family") not in DRAWN:
        monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def test_every_family_is_here() -> None:
    """PaliGemma 2 has the model type of PaliGemma."""
    assert {*BUILDERS} - {"paligemma2"} == {*list_model_types()}


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.usefixtures("quick_figures")
def test_eval(folder: Callable[[str], Path], data: Path, run: Run, tmp_path: Path, family: str) -> None:
    """Every method, batched and corrupted: all questions are answered, with as many tokens as were asked for."""
    options = ["--methods", "all", "--keep", KEEP, "--corrupt", *GAUSSIAN, "--max-new-tokens", 2]
    code, out, err = run(
        *("eval", "--model", folder(family), "--task", "custom", "--data", data, "-o", tmp_path / "run", *options)
    )
    assert code == 0, out + err
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert len(records) == 3 * len(GAUSSIAN) * len(list_methods("encoder"))
    for record in records:
        whole = record["method"]["name"] == "none"
        assert record["error"] is None
        assert record["visual_tokens"] == (record["unpruned_tokens"] if whole else KEEP), record["method"]
    assert {record["unpruned_tokens"] > KEEP for record in records} == {True}
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.usefixtures("quick_figures")
def test_eval_of_drawn_scenes(folder: Callable[[str], Path], run: Run, tmp_path: Path, family: str) -> None:
    options = ["--methods", "none", "clustrs", "--keep", KEEP, "--limit", 2, "--max-new-tokens", 2]
    code, out, err = run("eval", "--model", folder(family), "-o", tmp_path / "run", *options)
    assert code == 0, out + err
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [record["error"] for record in records] == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "study"),
    [
        (family, study)
        for family in BUILDERS
        for study in STUDIES
        if family in DRAWN or (family not in SAME_ADAPTER and study not in GRIDS)
    ],
)
def test_studies(
    folder: Callable[[str], Path],
    data: Path,
    run: Run,
    tmp_path: Path,
    family: str,
    study: str,
    monkeypatch: pytest.MonkeyPatch,
    quick_figures: list[Any],
) -> None:
    """A figure, numbers and findings, for images of several crops or of any size too; no figure stays open."""
    from matplotlib import pyplot

    from clustrs.evaluation.tasks import custom

    before = pyplot.get_fignums()
    monkeypatch.setitem(custom.NEW_TOKENS, "exact", 2)
    first, *options = STUDIES[study]
    many = study in ("stability", "denoising")
    images = [data / "wide.png", data / "tall.png"] if many else [data / "wide.png"]
    given: list[Any] = [*images] if first == "IMAGES" else ["--task", "custom", "--data", data]
    code, out, err = run("study", study, *given, *options, "--model", folder(family), "--quiet", "-o", tmp_path)
    assert code == 0, out + err
    for ending in ("png", "svg", "csv"):
        files = list(tmp_path.glob(f"*.{ending}"))
        assert files, ending
        assert min(file.stat().st_size for file in files) > 0
    table = next(tmp_path.glob("*.csv")).read_text().splitlines()
    assert len(table) > 1
    assert out
    assert pyplot.get_fignums() == before
    assert len(quick_figures) == (0 if family in DRAWN else 2 * len(list(tmp_path.glob("*.png"))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("ask",), ("compare", "--methods", "none", "clustrs", "visionzip")], ids=lambda c: c[0]
)
@pytest.mark.parametrize("family", BUILDERS)
def test_ask_and_compare(
    folder: Callable[[str], Path], data: Path, run: Run, tmp_path: Path, family: str, command: tuple[str, ...]
) -> None:
    """With a drawing of what was kept."""
    options = ["--model", folder(family), "--keep", KEEP, "--max-new-tokens", 2, "--json", "--show", tmp_path / "k.png"]
    code, out, err = run(command[0], data / "tall.png", "What is it?", *command[1:], *options)
    assert code == 0, err
    printed = json.loads(out)
    assert printed.get("results", [printed])[-1]["visual_tokens"] == KEEP
    assert (tmp_path / "k.png").stat().st_size > 1000
