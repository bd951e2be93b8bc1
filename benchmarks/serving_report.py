"""Tables, a plot and a page of what benchmarks/serving.py has measured."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from clustrs import palette
from clustrs_paper.evidence.page import filled

Row = dict[str, Any]
DOCS = Path(__file__).resolve().parent.parent / "docs"
STORED, PAGE, PICTURE = (DOCS / name for name in ("results/serving.json", "serving.md", "images/bench_serving.png"))
SHOWN = 32  # requests at once on the page


def label(keep: int | float | None) -> str:
    return "plain" if keep is None else "all" if keep == 1.0 else str(keep)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each row with its ratio to the plain server's, of the same model and number of requests at once."""
    plain = {(row["model"], row["at_once"]): row for row in rows if row["keep"] is None}
    compared = []
    for row in rows:
        base = plain.get((row["model"], row["at_once"]))
        names = ("requests_per_second", "first_token_median", "prompt_tokens", "blocks_mean")
        ratios = {} if base is None else {name: round(row[name] / base[name], 3) for name in names if base[name]}
        compared.append({**row, "ratios": ratios})
    return compared


def break_even(rows: list[Row]) -> list[Row]:
    """Per model and number of requests at once, the share of the visual tokens from whose removal on a pruned server
    answers as many requests as the plain one, interpolated between the measured budgets. None: at no budget."""
    found = []
    for model, at_once in dict.fromkeys((row["model"], row["at_once"]) for row in rows):
        subset = [row for row in rows if (row["model"], row["at_once"]) == (model, at_once)]
        plain = next((row for row in subset if row["keep"] is None), None)
        text = next((row["prompt_tokens"] - row["keep"] for row in subset if isinstance(row["keep"], int)), None)
        if plain is None or text is None:
            continue
        visual = plain["prompt_tokens"] - text
        points = sorted(
            (1 - (row["prompt_tokens"] - text) / visual, plain["requests_per_second"] / row["requests_per_second"] - 1)
            for row in subset
            if row["keep"] is not None
        )
        share = points[0][0] if points[0][1] <= 0 else None
        for (less, slower), (more, faster) in pairwise(points):
            if share is None and faster <= 0:
                share = less + (more - less) * slower / (slower - faster)
        found.append({"model": model, "at_once": at_once, "share": share})
    return found


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|:--|{'--:|' * (len(columns) - 1)}", *lines[1:]])


def measured(rows: Iterable[Row], hidden: Sequence[str] = ()) -> str:
    """Return the table of what was measured, without some columns."""
    found = []
    for row in rows:
        ratios = row["ratios"]

        def shown(name: str, text: str, ratios: Row = ratios) -> str:
            return f"{text} (x{ratios[name]:.2f})" if name in ratios else text

        stages = [row.get(f"{stage}_per_step") for stage in ("scoring", "selection")]
        cells = {
            "model": row["model"],
            "visual tokens": label(row["keep"]),
            "at once": str(row["at_once"]),
            "answered": f"{row['requests']}" + (f" ({row['failed']} failed)" if row["failed"] else ""),
            "requests/s": shown("requests_per_second", f"{row['requests_per_second']:.2f}"),
            "first token, median": shown("first_token_median", f"{row['first_token_median']:.2f} s"),
            "p99": f"{row['first_token_p99']:.2f} s",
            "prompt": shown("prompt_tokens", f"{row['prompt_tokens']:.0f}"),
            "KV blocks, mean (peak)": shown("blocks_mean", f"{row['blocks_mean']:.0f} ({row['blocks_peak']})"),
            "scoring, selection per step": ", ".join("-" if one is None else f"{1000 * one:.1f} ms" for one in stages),
        }
        found.append({name: cell for name, cell in cells.items() if name not in hidden})
    return table(list(found[0]), [list(cells.values()) for cells in found])


def where_it_pays(rows: list[Row]) -> str:
    shares = [
        (row["model"], str(row["at_once"]), "more than measured" if row["share"] is None else f"{row['share']:.0%}")
        for row in break_even(rows)
    ]
    return table(("model", "at once", "visual tokens to remove until pruning pays"), shares)


def markdown(result: Row) -> str:
    """Return the tables of what was measured, of what the cost model says, and from where on pruning pays."""
    columns = (
        "model",
        "visual tokens",
        "GFLOPs to the first token",
        "of them tower and projector",
        "ratio",
        "KV cache",
    )
    modeled = [
        (
            row["model"],
            str(row["keep"]),
            f"{row['gflops']:.2f}",
            f"{row['tower_share']:.0%}",
            f"x{row['flops_ratio']:.2f}",
            f"x{row['kv_ratio']:.2f}",
        )
        for row in result["predicted"]
    ]
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    parts = (machine, measured(result["rows"]), table(columns, modeled), where_it_pays(result["rows"]))
    return "\n\n".join(parts) + "\n"


def page_blocks(result: Row) -> dict[str, str]:
    """Return the parts of docs/serving.md that are measured, by the name of their place."""
    rows = [row for row in result["rows"] if row["at_once"] == SHOWN]
    counted = sorted((row for row in rows if isinstance(row["keep"], int)), key=lambda row: -row["keep"])
    few = {row["model"]: row for row in counted}  # the smallest budget of each
    lines = []
    for name, row in few.items():
        rate, first = row["ratios"]["requests_per_second"], 100 * row["ratios"]["first_token_median"]
        requests = f"with {row['keep']} tokens {rate:.1f} times as many requests"
        lines.append(f"- {name}: {requests}, the first token after {first:.0f} % of the time.")
    shown = measured(rows, hidden=("at once", "answered"))
    return {"servers": f"{shown}\n\n" + "\n".join(lines) + "\n", "pays": where_it_pays(result["rows"]) + "\n"}


def write_page(result: Row) -> None:
    """Write the tables and the plot of docs/serving.md."""
    text = PAGE.read_text()
    for name, block in page_blocks(result).items():
        text = filled(text, block, name)
    PAGE.write_text(text)
    plot(result, PICTURE)


def plot(result: Row, path: Path) -> None:
    """Requests per second and time to the first token, per model and number of requests at once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    shown = (
        ("requests_per_second", "requests per second"),
        ("first_token_median", "seconds to the first token, median"),
    )
    fig, axes = plt.subplots(2, len(models), figsize=(5.2 * len(models), 6.4), layout="constrained", squeeze=False)
    for column, model in enumerate(models):
        subset = [row for row in rows if row["model"] == model]
        labels = list(dict.fromkeys(label(row["keep"]) for row in subset))
        levels = list(dict.fromkeys(row["at_once"] for row in subset))
        for line, (name, title) in enumerate(shown):
            axis = axes[line][column]
            for i, at_once in enumerate(levels):
                heights = [row[name] for row in subset if row["at_once"] == at_once]
                width = 0.8 / len(levels)
                places = [x + (i - (len(levels) - 1) / 2) * width for x in range(len(heights))]
                bars = axis.bar(
                    places, heights, width, color=palette.SERIES[i % len(palette.SERIES)], label=f"{at_once} at once"
                )
                axis.bar_label(bars, fmt="%.3g", fontsize=8)
            axis.set_xticks(range(len(labels)), labels)
            axis.set(xlabel="visual tokens kept", ylabel=title)
            axis.margins(y=0.12)
            axis.grid(axis="y", alpha=0.3)
        axes[0][column].set_title(model)
    handles = axes[0][0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=len(handles[0]), frameon=False)
    fig.savefig(path, dpi=110)
