"""The project's own files agree with each other: make targets, versions, workflows, templates."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE) for name in line.split()}


def make_commands(text: str) -> set[str]:
    """Find `make TARGET` in code spans, code blocks and steps of a workflow, not in sentences."""
    variables = r"(?:[A-Z_]+=\S+ )*"
    spans = re.findall(rf"`{variables}make ([a-z][a-z-]*)[^`\n]*`", text)
    blocks = re.findall(rf"^(?: {{4,}}|\s*- run: |[$] ?|){variables}make ([a-z][a-z-]*)", text, re.MULTILINE)
    return {*spans, *blocks}


def workflow(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def lower_bounds() -> dict[str, str]:
    lines = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"]["models"]]
    return dict(re.findall(r"^([a-z]+)>=([\d.]+)$", "\n".join(lines), re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", {"demo", "test"}),
        (
            "CONTRIBUTING.md",
            {
                "test",
                "test-fast",
                "test-graphs",
                "test-docs",
                "test-oldest",
                "test-app",
                "lint",
                "format",
                "graph",
                "help",
                "bench",
            },
        ),
        (".github/pull_request_template.md", {"lint", "test", "graph", "bench"}),
        (".github/workflows/lint.yml", {"lint"}),
        (
            ".github/workflows/tests.yml",
            {"test", "test-graphs", "test-docs", "test-oldest", "test-vllm", "test-lmms", "test-app"},
        ),
        (
            ".ci/run",
            {
                "setup",
                "environments",
                "lint",
                "test",
                "test-graphs",
                "test-docs",
                "docs",
                "test-vllm",
                "test-lmms",
                "test-app",
            },
        ),
        ("docs/embedded.md", {"train"}),
        ("docs/benchmarks.md", {"bench"}),
    ],
)
def test_make_commands_exist(page: str, expected: set[str]) -> None:
    commands = make_commands((ROOT / page).read_text(encoding="utf-8"))
    assert expected <= commands
    assert commands <= make_targets()


def test_make_commands_of_all_pages_exist() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert make_commands(page.read_text(encoding="utf-8")) <= make_targets(), page.name


def test_help_lists_every_target() -> None:
    run = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in run.stdout.splitlines()} == make_targets()
    assert all(len(line.split()) > 2 for line in run.stdout.splitlines())


def test_targets_of_the_makefile_are_phony() -> None:
    """Otherwise a file or folder of that name would switch the target off."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)) == make_targets()


def test_newest_release_is_that_of_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", section) for section in sections[1:]]
    assert None not in released
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = released[0]
    assert newest is not None
    assert newest.groups() == (citation["version"], str(citation["date-released"]))


def test_changelog_uses_the_usual_headings() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = set(re.findall(r"^### (.+)$", changelog, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_readme_names_the_oldest_versions() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    bounds = lower_bounds()
    assert f"torch {bounds['torch']} or newer" in readme
    assert f"transformers {bounds['transformers']} or newer" in readme


def test_oldest_transformers_is_the_one_tested() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^OLDEST_TRANSFORMERS := (.+)$", makefile, re.MULTILINE) == [lower_bounds()["transformers"]]


def test_every_declared_python_is_tested() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)$", "\n".join(PYPROJECT["project"]["classifiers"]), re.MULTILINE)
    tested = workflow(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert tested["python-version"] == classifiers
    assert PYPROJECT["project"]["requires-python"] == f">={classifiers[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_ask_for_little(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in content["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", action) for action in used), used
    assert all("timeout-minutes" in job for job in content["jobs"].values())


def test_only_publishing_may_ask_for_an_identity() -> None:
    jobs = {(path.stem, name): job for path in WORKFLOWS for name, job in workflow(path)["jobs"].items()}
    assert {key for key, job in jobs.items() if "permissions" in job} == {("publish", "publish")}
    assert jobs["publish", "publish"]["permissions"] == {"id-token": "write"}
    assert {path.stem for path in WORKFLOWS} == {"lint", "tests", "publish"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_complete(path: Path) -> None:
    form = workflow(path)
    assert {"name", "description", "body"} <= form.keys()
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_there_is_a_form_for_bugs_features_and_methods() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "new-method"]


def test_pre_commit_runs_what_lint_runs() -> None:
    hooks = workflow(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert lint is not None
    assert {hook["entry"].split()[0] for hook in hooks} == {
        line.split()[0].replace("$(BIN)", ".venv/bin") for line in lint[1].splitlines()
    }


@pytest.mark.gpu
def test_gpu_tests_run_on_a_device() -> None:
    import torch

    assert torch.cuda.is_available()
