"""The flat API: every public name exists, is known to type checkers, is documented, and its examples run."""

import ast
import doctest
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import clustrs

NAMES = [name for name in clustrs.__all__ if name != "__version__"]
CALLABLE = [name for name in NAMES if callable(getattr(clustrs, name))]


def test_every_name_is_where_the_table_says() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 40
    for name in NAMES:
        assert getattr(clustrs, name) is not None
        assert name in dir(clustrs)
    with pytest.raises(AttributeError, match="module 'clustrs' has no attribute 'Clusters'"):
        clustrs.Clusters  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(clustrs.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [(node.module, alias) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    facade = ast.parse(Path(clustrs.pruners.__file__).read_text()).body
    methods = [alias.asname for node in facade if isinstance(node, ast.ImportFrom) for alias in node.names]
    seen = {str(name): "clustrs.pruners" for name in methods}
    assert ("clustrs.pruners", "*") in [(module, alias.name) for module, alias in imports]
    seen |= {alias.asname: str(module) for module, alias in imports if alias.asname}
    assert seen == clustrs._MODULE_OF


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, clustrs; clustrs.__all__; print(*{'torch', 'numpy', 'transformers', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", CALLABLE)
def test_public_names_are_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(clustrs, name))
    assert doc
    assert not doc.startswith(("What ", "How ", "Where ", "Which ", "Whether ", "A way "))


@pytest.mark.parametrize("name", CALLABLE)
def test_examples_of_public_names_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Examples know torch and all names of `clustrs`, and `folder`, an empty one; methods and tasks that they
    register are forgotten afterwards."""
    from clustrs.evaluation import tasks
    from clustrs.pruners import registry

    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    monkeypatch.setattr(tasks, "_registered", dict(tasks._registered))
    thing: Any = getattr(clustrs, name)
    scope = dict(vars(sys.modules[thing.__module__])) if hasattr(thing, "__module__") else {}
    scope |= {name: getattr(clustrs, name) for name in NAMES} | {"torch": torch, "folder": tmp_path}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder(recurse=True).find(thing, name, globs=scope):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize(
    "name",
    ["Pruner", "PrunerInputs", "Selection", "Layout", "register", "list_methods", "get_method", "from_dict"]
    + [clustrs.method_class(name).__name__ for name in clustrs.list_methods()],
)
def test_methods_and_their_contract_have_examples(name: str) -> None:
    doc = inspect.getdoc(getattr(clustrs, name)) or ""
    assert "Examples:" in doc  # the heading that mkdocstrings renders as code
    assert ">>> " in doc
