"""Write the support matrix (families, and where each runs) into README.md: `make matrix`."""

import re
from pathlib import Path

from clustrs.cli.catalog import support_matrix

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md",)
PLACE = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.S)


def with_matrix(text: str) -> str:
    """Return a page's text with the current matrix between its markers."""
    matrix = f"\n{support_matrix()}\n\n"
    changed, count = PLACE.subn(lambda found: f"{found[1]}{matrix}{found[2]}", text)
    if count != 1:
        raise ValueError(f"expected one place for the matrix (<!-- matrix --> ... <!-- end -->), got {count}")
    return changed


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_matrix(page.read_text()))
