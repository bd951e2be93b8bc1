"""Write the runs of `clustrs bench` in docs/results/bench into docs/bench.md and README.md: `python -m tools.speed`."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec

from clustrs.evaluation.bench import BenchResult

INTRODUCTION = """\
Speed of LLaVA-1.5-7B's architecture with random weights and ClusterMeans, on two CPU cores; a GPU's is different, and
[`clustrs bench`](docs/bench.md) measures yours:"""
ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- speed -->\n).*?(<!-- end -->)", re.S)
SHAPES = ("llava-1.5-7b", "qwen3-vl-4b", "llava-onevision-0.5b", "smolvlm-256m")
SHOWN = ("visual tokens", "prefill, ms", "first token, ms", "first token, x", "end to end, x", "KV cache, MiB")


def results() -> dict[str, BenchResult]:
    folder = ROOT / "docs" / "results" / "bench"
    return {name: msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=BenchResult) for name in SHAPES}


def page_part() -> str:
    """Return heading, table and sentence of every run."""
    parts = []
    for name, result in results().items():
        tables = [replace(table, title="").markdown() for table in result.tables()]
        parts += [f"## {name}", f"{result.heading()}.", *tables, f"So {result.sentence()}."]
    return "\n\n".join(parts)


def readme_part() -> str:
    """Return the heading and some lines of the 7B model's table."""
    result = results()[SHAPES[0]]
    (table,) = result.tables()
    rows = tuple(row for row in table.rows if row.heads[0].startswith(SHOWN))
    return f"{INTRODUCTION}\n\n{replace(table, title='', rows=rows).markdown()}\n\n{result.heading()}."


def with_runs(text: str, part: str) -> str:
    """Return a page's text with a part between its markers."""
    changed, count = PLACE.subn(lambda found: f"{found[1]}\n{part}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"expected one place for the runs (<!-- speed --> ... <!-- end -->), got {count}")
    return changed


PAGES = {ROOT / "docs" / "bench.md": page_part, ROOT / "README.md": readme_part}

if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(with_runs(page.read_text(), make()))
    results()[SHAPES[0]].plot(ROOT / "docs" / "images" / "bench.png")
