"""Hook of the documentation site: pages from files outside docs/, and links that fit."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository's root."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the files outside docs/ at their pages."""
    for page, source in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown
