"""The HTML parts of the page: cards, tables, curves, tokens. All texts are escaped."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from clustrs.app.inspection import Inspection, View
from clustrs.app.results import Disagreement, OpenRun
from clustrs.app.trial import NO_PRUNING, TrialAnswer
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.report import document
from clustrs.evaluation.report.document import LARGEST_IMAGE, data_uri
from clustrs.evaluation.report.scores import figures, words
from clustrs.evaluation.tasks import normalize_answer
from clustrs.models.draw import overlay_kept
from clustrs.palette import color
from clustrs.pruners import method_class

LISTED = 100  # disagreements that a list shows
HEAT = ("#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4")  # dark to light: they also work in gray
PLANE, MARGIN = 400, 28  # pixels of a drawing of tokens
FOLDERS = [Path(__file__).parent / "templates", Path(document.__file__).parent]
TEMPLATES = Environment(loader=FileSystemLoader(FOLDERS), autoescape=True, undefined=StrictUndefined)
TEMPLATES.filters["milliseconds"] = lambda seconds: "\N{EN DASH}" if seconds is None else f"{1000 * seconds:.1f} ms"
TEMPLATES.filters["short"] = lambda text, width: shorten(text, width, placeholder=" …")
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
TEMPLATES.filters["bytes"] = lambda count: next(
    (f"{count / size:.3g} {unit}" for unit, size in UNITS if count is not None and count >= size), "\N{EN DASH}"
)


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(f"{template}.html.j2").render(**values)


def label(name: str) -> str:
    return "Unpruned" if name == NO_PRUNING else method_class(name).label


def kept_picture(image: Image.Image, answer: TrialAnswer) -> str:
    """Draw the kept tokens over `image`, which is what the base crop shows; "" before they are known."""
    return "" if answer.image is None else data_uri(overlay_kept(image, answer.image, size=LARGEST_IMAGE))


def answer_card(
    answer: TrialAnswer, picture: str = "", expected: str | None = None, others: Sequence[TrialAnswer] = ()
) -> str:
    """Render an answer, right if it is the expected one word for word, and the share of the KV cache it saves."""
    correct = None if expected is None else normalize_answer(answer.text) == normalize_answer(expected)
    whole = next((one.kv_bytes for one in others if one.method == NO_PRUNING), None)
    own = None if answer.method == NO_PRUNING else answer.kv_bytes
    saved = None if not whole or own is None else 1 - own / whole
    look = {"label": label(answer.method), "color": color(answer.method), "picture": picture}
    return render("answer", answer=answer, correct=correct, saved=saved, **look)


def inspection(result: Inspection) -> str:
    """Render the tokens of every view, with the data that the page's script needs to link them."""
    spans = []
    for name in ("px", "py"):
        values = [value for view in result.views for value in view.columns[name]]
        low, high = min(values), max(values)
        spans.append((low, high) if high > low else (low - 1, high + 1))
    (left, right), (low, high) = spans
    inner, names = PLANE - 2 * MARGIN, ("tile", "y", "x", "score", "kept", "px", "py")
    views = []
    for view in result.views:
        width, height = PLANE, round(PLANE * view.image.height / view.image.width)
        cell = round(width / view.grid[1], 3), round(height / view.grid[0], 3)
        tokens = [
            {
                "index": index,
                "tile": tile,
                "kept": kept,
                "place": f"row {y + 1}, column {x + 1}" + (f", crop {tile + 1}" if tile else ""),
                "score": f"{score:.3g}",
                "left": round(x * cell[0], 3),
                "top": round(y * cell[1], 3),
                "cx": round(MARGIN + inner * (px - left) / (right - left), 1),
                "cy": round(PLANE - MARGIN - inner * (py - low) / (high - low), 1),
            }
            for index, (tile, y, x, score, kept, px, py) in enumerate(zip(*map(view.columns.get, names), strict=True))
        ]
        heat, brightest = attention_map(view)
        rounded = {
            name: [float(f"{value:.5g}") if isinstance(value, float) else value for value in values]
            for name, values in view.columns.items()
        }
        shown = {"title": view.title, "note": view.note, "width": width, "height": height, "cell": cell}
        views.append(
            {
                **shown,
                "tokens": tokens,
                "first": next((one["index"] for one in tokens if one["kept"] and not one["tile"]), None),
                "columns": json.dumps(rounded),
                "picture": data_uri(view.image),
                "attention": data_uri(heat),
                "brightest": f"{brightest:.2g}",
            }
        )
    return render("inspection", views=views, clusters=result.clusters, shares=result.shares, label=label(result.method))


def attention_map(view: View) -> tuple[Image.Image, float]:
    """Draw the scores of the base crop over the gray image; also return the score of the brightest color."""
    tile, y, x, score = (np.array(view.columns[name]) for name in ("tile", "y", "x", "score"))
    heat = np.zeros(view.grid)
    heat[y[tile == 0], x[tile == 0]] = score[tile == 0]
    brightest = float(np.quantile(heat, 0.99)) or 1.0  # a few outliers would leave all else black
    stops = np.array([[int(tone[i : i + 2], 16) for i in (1, 3, 5)] for tone in HEAT])
    level = np.clip(heat / brightest, 0, 1) * (len(HEAT) - 1)
    tones = np.stack([np.interp(level, range(len(HEAT)), stops[:, channel]) for channel in range(3)], -1)
    gray = view.image.convert("L").convert("RGB")
    gray.thumbnail((LARGEST_IMAGE, LARGEST_IMAGE))
    layer = Image.fromarray(tones.round().astype(np.uint8)).resize(gray.size, Image.Resampling.NEAREST)
    return Image.blend(gray, layer, 0.7), brightest


def curves(opened: OpenRun, corruption: str, budget: str) -> str:
    for figure in figures(opened.summary):
        if figure.x_label == f"{corruption} level":
            shown = replace(figure, panels=tuple(panel for panel in figure.panels if panel[0] == f"keep {budget}"))
            return render("curves", block=shown, size=document)
    return ""


def cells(opened: OpenRun, corruption: str, budget: str, chosen: tuple[int, int] | None = None) -> str:
    run, summary = opened.run, opened.summary
    methods = [(m, summary.label(m), color(run.methods[m].name)) for m in opened.methods(budget)]
    rows = [
        (i, run.conditions[i].level_text or "clean", [summary.value(summary.estimates[m][i]) for m, *_ in methods])
        for i in opened.conditions(corruption)
    ]
    head = "" if corruption == CLEAN else words(corruption)
    return render("cells", unit=summary.unit, budget=budget, head=head, methods=methods, rows=rows, chosen=chosen)


def disagreement_list(found: Sequence[Disagreement], first: str, second: str, condition: str) -> str:
    better = sum(one.first.score > one.second.score for one in found)
    counts = {"listed": found[:LISTED], "total": len(found), "first_better": better}
    return render("disagreements", first=first, second=second, condition=condition, **counts)


def disagreement(one: Disagreement, pictures: Sequence[Image.Image | None], note: str) -> str:
    sides = [
        (said, color(said.method), "" if picture is None else data_uri(picture))
        for said, picture in zip((one.first, one.second), pictures, strict=True)
    ]
    return render("disagreement", one=one, sides=sides, note=note)
