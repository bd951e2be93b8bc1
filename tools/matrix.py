"""Write the support matrix (families, and where each runs) into README.md and families.json: `make matrix`."""

import json
import re
from pathlib import Path

from clustrs.cli.base import markdown_table
from clustrs.cli.catalog import FAMILIES, MATRIX, families

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md",)
PLACE = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.S)


def with_matrix(text: str) -> str:
    """Return a page's text with the current matrix between its markers, and what no family is in a sentence."""
    rows = families()
    shown = [key for key in MATRIX if any(row[key] != "no" for row in rows)]
    table = markdown_table([MATRIX[key] for key in shown], [[row[key] for key in shown] for row in rows])
    never = " or ".join(name for key, name in MATRIX.items() if key not in shown)
    obstacles: dict[str, list[str]] = {}
    for row in rows:
        if row["vllm_obstacle"]:
            obstacles.setdefault(row["vllm_obstacle"], []).append(row["model_type"])
    missing = "; ".join(f"{', '.join(names)} ({obstacle})" for obstacle, names in obstacles.items())
    vllm = "In vLLM a family has a pruned class, or vLLM's Transformers backend runs it (`backend`)."
    matrix = f"\n{table}\n\n{vllm} Not served: {missing}.\n" + (f"No family was {never} yet.\n" if never else "")
    changed, count = PLACE.subn(lambda found: f"{found[1]}{matrix}{found[2]}", text)
    if count != 1:
        raise ValueError(f"expected one place for the matrix (<!-- matrix --> ... <!-- end -->), got {count}")
    return changed


def as_json() -> str:
    """Return the families as `clustrs models` reads them, a line each."""
    return "[\n" + ",\n".join(map(json.dumps, families())) + "\n]\n"


if __name__ == "__main__":
    FAMILIES.write_text(as_json())
    for page in PAGES:
        page.write_text(with_matrix(page.read_text()))
