"""Write the runs of `clustrs bench` in docs/results/bench into docs/bench.md and README.md: `python -m tools.speed`.

Nothing is written where there are no runs.
"""

import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec

from clustrs.evaluation.bench import BenchResult

ON_PAGE = """\
## Shapes on two cores

float32 on the two cores of a virtual machine, where the prefill is slow: on a GPU shares and gains differ, so measure
yours. **Nothing was timed on a GPU.** Positions and attention are `auto`.

![Time to the first token of LLaVA-1.5-7B, extrapolated](images/bench.png)"""
IN_README = """\
LLaVA-1.5-7B's architecture with random weights, ClusterMeans, on **two CPU cores; a GPU differs**, and
[`clustrs bench`](docs/bench.md) measures yours"""
ROOT = Path(__file__).resolve().parent.parent
RUNS, PICTURE = ROOT / "docs" / "results" / "bench", ROOT / "docs" / "images" / "bench.png"
PLACE = re.compile(r"(<!-- speed -->\n).*?(<!-- end -->)", re.S)
FIRST = "llava-1.5-7b"


def results() -> dict[str, BenchResult]:
    """Return the stored runs by shape, the one of the README first; none before that is stored."""
    found = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=BenchResult) for path in sorted(RUNS.glob("*.json"))
    }
    return {FIRST: found.pop(FIRST), **found} if FIRST in found else {}


def page_part() -> str:
    """Return heading, table and sentence of every run."""
    parts = [ON_PAGE] if results() else []
    for name, result in results().items():
        tables = [replace(table, title="").markdown() for table in result.tables()]
        parts += [f"### {name}", f"{result.heading()}.", *tables, f"So {result.sentence()}."]
    return "\n\n".join(parts)


def readme_part() -> str:
    """Return the 7B model's medians: time to the first token, how much sooner, and the KV cache."""
    if not results():
        return ""
    result = results()[FIRST]
    rows = result.rows
    lines = {
        "visual tokens": [f"{row.visual_tokens}" for row in rows],
        "first token, s": [f"{median(row.seconds['first token']):.1f}" for row in rows],
        "times faster": [f"{median(result.speedups(row, 'first token')):.1f}" for row in rows],
        "KV cache, MiB": [f"{row.kv_bytes / 2**20:.0f}" for row in rows],
    }
    (_, head), *body = lines.items()
    table = [["visual tokens", *head], ["---", *["---:"] * len(head)], *([name, *cells] for name, cells in body)]
    drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    cut = f", extrapolated from {result.layers_run} of {result.layers} layers" if result.scaled else ""
    where = "[ranges and stages](docs/bench.md#shapes-on-two-cores)"
    return f"{IN_README}\n(medians of {result.repeats} turns{cut}; {where}):\n\n{drawn}"


def with_runs(text: str, part: str) -> str:
    """Return a page's text with a part between its markers."""
    block = f"\n{part}\n\n" if part else ""
    changed, count = PLACE.subn(lambda found: f"{found[1]}{block}{found[2]}", text)
    if count != 1:
        raise ValueError(f"expected one place for the runs (<!-- speed --> ... <!-- end -->), got {count}")
    return changed


PAGES = {ROOT / "docs" / "bench.md": page_part, ROOT / "README.md": readme_part}

if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(with_runs(page.read_text(), make()))
    if results():
        results()[FIRST].plot(PICTURE)
