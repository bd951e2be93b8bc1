"""Help and version are quick: they import nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "PIL", "matplotlib", "tqdm", "yaml", "ray", "openai", "scipy"}


def imported(code: str) -> set[str]:
    """Which heavy modules a fresh interpreter has imported after running some code."""
    program = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('imported:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return HEAVY & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["ask", "--help"], ["compare", "--help"], ["eval", "--help"], ["study", "--help"]],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    assert imported(f"from clustrs.cli import main; main({words!r})") == set()


def test_the_help_of_a_study_imports_nothing_heavy() -> None:
    assert imported("from clustrs.cli import main; main(['study', 'stability', '--help'])") == set()


@pytest.mark.parametrize(
    "words",
    [
        ["ask", "sample:photo-33", "What?"],
        ["ask", "sample:photo-3", "What?", "--model", "photo-lava"],
        ["ask", "sample:photo-3", "What?", "--corrupt", "gausian:1"],
        ["ask", "no-such-file.png", "What?"],
        ["compare", "sample:photo-3", "What?", "--model", "photo-lava"],
        ["app", "--model", "photo-lava"],
    ],
    ids=" ".join,
)
def test_mistyped_names_are_told_before_torch_is_imported(words: list[str]) -> None:
    assert imported(f"from clustrs.cli import main; assert main({words!r}) == 2") <= {"numpy", "PIL"}


def test_a_mistyped_model_of_a_run_is_told_before_transformers_is_imported() -> None:
    words = ["eval", "--model", "photo-lava"]
    assert "transformers" not in imported(f"from clustrs.cli import main; assert main({words!r}) == 2")


def test_modules_of_the_package_do_not_import_torch() -> None:
    assert imported("import clustrs; from clustrs import palette, validation; clustrs.__version__") == set()
    assert "torch" in imported("import clustrs; clustrs.ClustRS")
