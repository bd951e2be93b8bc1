"""The folder of a small run with made-up answers."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from numpy.random import default_rng

Row = dict[str, Any]
METHODS: list[Row] = [
    {"name": "none", "keep": 1.0},
    *({"name": "fastervlm", "keep": keep} for keep in (4, 8)),
    *({"name": "clustrs", "keep": keep, "tau": 1.0, "clip": [0.1, 0.95]} for keep in (4, 8)),
]
CONFIG: Row = {
    "task": "mm-vet",
    "data": None,
    "model": "mini-llava",
    "methods": METHODS,
    "corruptions": ["clean", "gaussian:0.5", "gaussian:2", "jpeg:30", "jpeg:60"],
    "seeds": [0],
    "limit": None,
    "judged": False,
    "scale": 100.0,
    "items": 12,
    "clustrs": "0.1.0",
}


def rows_of(config: Row) -> list[Row]:
    """An answer to every question of the grid; later methods are better, and nobody likes noise."""
    generator = default_rng(0)
    rows = []
    grid = product(
        enumerate(config["methods"]), enumerate(config["corruptions"]), config["seeds"], range(config["items"])
    )
    for (place, method), (noise, corruption), seed, item in grid:
        score = min(1.0, max(0.0, round(generator.normal(0.5 + 0.05 * place - 0.08 * noise, 0.3), 1)))
        budget = 0 if method["name"] == "none" else round(method["keep"])
        kept = generator.choice(max(20, budget), budget, replace=False).tolist()
        rows.append(
            {
                "item": f"v1_{item}",
                "image": f"{item}.png",
                "kinds": ["ocr", "math"][: 1 + item % 2],
                "question": "?",
                "answer": "!",
                "method": method,
                "corruption": corruption,
                "seed": seed,
                "text": f"answer {item} {score}",
                "score": score,
                "error": None,
                "kept": kept,
                "visual_tokens": len(kept),
                "unpruned_tokens": 20,
            }
        )
    return rows


def failed(row: Row, error: str = "broken image") -> Row:
    return {**row, "text": None, "score": None, "kept": None, "error": error}


def write_run(
    folder: Path, change: Callable[[list[Row]], list[Row]] = lambda rows: rows, end: str = "", **settings: Any
) -> Path:
    """A run's folder. `change` may alter the answers, `settings` the configuration; `end` comes after the answers."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(row) + "\n" for row in change(rows_of(config))]
    (folder / "answers.jsonl").write_text("".join(lines) + end)
    return folder


def large_run(folder: Path, items: int, kinds: int = 6, judged: bool = False) -> Path:
    """The folder of a run with 20 answers to each question: of four methods under five conditions.

    With a judge every answer differs from the others and has a verdict.
    """
    folder.mkdir()
    methods: list[Row] = [
        {"name": "none", "keep": None},
        *({"name": name, "keep": 32} for name in ("grid", "random", "clustrs")),
    ]
    corruptions = ["clean", *(f"gaussian:{level}" for level in (0.1, 0.5, 1, 2))]
    changes = {"methods": methods, "corruptions": corruptions, "items": items, "judged": judged}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = default_rng(0)
    with (folder / "answers.jsonl").open("w") as answers, (folder / "verdicts.jsonl").open("w") as verdicts:
        for item, method, corruption in product(range(items), methods, corruptions):
            name, text, score = f"v1_{item}", f"It is {item}.", round(generator.random(), 1)
            if judged:
                text = f"It is {item} {method['name']} {corruption}: a cat sits on a mat and looks at the camera."
                verdict = {"item": name, "text": text, "judge": "j", "round": 0, "score": score, "error": None}
                verdicts.write(json.dumps(verdict) + "\n")
            kept = [] if method["keep"] is None else generator.choice(576, int(method["keep"]), replace=False).tolist()
            record = {
                "item": name,
                "image": f"{item}.png",
                "kinds": [f"kind {(7 * item + i) % kinds}" for i in range(max(1, kinds // items))],
                "question": "?",
                "answer": "!",
                "method": method,
                "corruption": corruption,
                "seed": 0,
                "text": text,
                "score": None if judged else score,
                "error": None,
                "kept": kept,
                "visual_tokens": len(kept),
                "unpruned_tokens": 576,
            }
            answers.write(json.dumps(record) + "\n")
    return folder
