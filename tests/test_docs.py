"""The examples in the documentation run and print what they say."""

import doctest
import re
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


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
