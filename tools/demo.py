"""Print what `make demo` measured: the share of the unpruned score that each method keeps, and what an answer costs.

python -m tools.demo out/demo out/demo-as-published     a run with place and weight, and one without
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from clustrs import count_cost
from clustrs.embedded import folder_of
from clustrs.evaluation.metrics import Values, question_means, retention
from clustrs.evaluation.report.summary import LATENCY_FILE, PARTS, Latency, read_stored
from clustrs.evaluation.results import Method, Run, load_run
from clustrs.evaluation.store import identity
from clustrs_paper.evidence.place_and_weight import short

LABELS = {
    "clustermeans": "ClusterMeans (ours)",
    "clustrs": "ClustRS (the paper)",
    "divprune": "DivPrune",
    "visionzip": "VisionZip",
    "tome": "ToMe",
}
OURS = "clustermeans"
TEXT_TOKENS = 12
"""Tokens of a question with its template, for the size of the cache."""
WIDTH = 100
SETTINGS = ("place and weight", "as published")


def scores(run: Run, method: Method, clean: bool) -> Values:
    """Return the scores [items] on clean images, or their mean over the noisy conditions."""
    chosen = [i for i, condition in enumerate(run.conditions) if (condition.level is None) == clean]
    return question_means(run.scores[run.methods.index(method)][chosen]).mean(0)


def kept_text(values: Values, unpruned: Values) -> str:
    share = retention(values, unpruned)
    return "-" if share is None else f"{100 * share:.0f} %"


def milliseconds(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the time of an answer by method, and the language model's part of it: prefill and one more token."""
    latency = read_stored(folder / LATENCY_FILE, Latency)
    times = () if latency is None else latency.milliseconds
    return {
        identity(dict(m)): (sum(ms.get(part, 0.0) for part in PARTS), ms["prefill"] + ms.get("decode", 0.0))
        for m, ms in times
    }


@cache
def cache_bytes(model: str, tokens: int) -> int:
    return count_cost(AutoConfig.from_pretrained(folder_of(model)), TEXT_TOKENS, tokens).kv_bytes


def row(
    name: str, run: Run, method: Method, unpruned: tuple[Values, Values], times: dict[str, tuple[float, float]]
) -> list[str]:
    """One method at one budget; costs do not depend on place and weight, so that times are measured once."""
    own = [scores(run, method, clean) for clean in (True, False)]
    index = run.methods.index(method)
    tokens = run.unpruned_tokens[index] if method.keep is None else run.visual_tokens[index]
    kib = cache_bytes(run.config["model"], round(float(tokens))) / 1024
    time = times.get(identity(run.config["methods"][index]), ())
    cells = [
        text
        for values, whole in zip(own, unpruned, strict=True)
        for text in (short(100 * values), kept_text(values, whole))
    ]
    return [name, *cells, *([f"{ms:.0f}" for ms in time] or ["-", "-"]), f"{kib:,.0f}"]


def headline(run: Run, unpruned: tuple[Values, Values]) -> str:
    """Return the first sentence: what our method keeps at the smallest budget."""
    method = next(m for m in run.methods if m.name == OURS)
    clean, noisy = (kept_text(scores(run, method, c), whole) for c, whole in zip((True, False), unpruned, strict=True))
    whole_tokens = round(float(np.nanmax(run.unpruned_tokens)))
    return (
        f"ClusterMeans keeps {clean} of the unpruned score with {method.keep} of {whole_tokens} tokens "
        f"({noisy} on noisy images)."
    )


def main(folders: Sequence[str]) -> int:
    paths = [Path(folder) for folder in folders]
    runs = [load_run(path) for path in paths]
    times = milliseconds(paths[0])
    none = next(method for method in runs[0].methods if method.keep is None)
    unpruned = (scores(runs[0], none, True), scores(runs[0], none, False))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "clean", "kept", "noisy", "kept", "ms", "LM ms", "KV KiB"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_row(*row("all tokens", runs[0], none, unpruned, times))
    for budget in runs[0].budgets:
        for run, setting in zip(runs, SETTINGS, strict=True):
            table.add_section()
            table.add_row(f"[bold]{budget} tokens, {setting}[/bold]")
            for method in run.methods:
                if method.budget == budget:
                    table.add_row(*row(f"  {LABELS.get(method.name, method.name)}", run, method, unpruned, times))
    console = Console()
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    config, noisy = runs[0].config, ", ".join(str(c) for c in runs[0].conditions if c.level is not None)
    about = (
        f"{config['model']} on {config['items']} questions of {config['task']}: per cent right, \N{PLUS-MINUS SIGN} "
        f"half of the 95 % interval, and share of the unpruned score kept. Noisy: {noisy}. As published: positions "
        "without gaps, every token one key. ms: one answer on this machine; LM: its prefill and one token."
    )
    console.print(f"\n[bold]{headline(runs[0], unpruned)}[/bold]\n{about}\n", highlight=False)
    console.print(table, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
