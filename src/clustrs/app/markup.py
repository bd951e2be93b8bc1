"""The HTML parts of the page: cards, tables, curves, tokens. All texts are escaped."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image, ImageOps

from clustrs.app.inspection import Inspection, View
from clustrs.app.results import Disagreement, OpenRun
from clustrs.app.trial import NO_PRUNING, TrialAnswer
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.report import document
from clustrs.evaluation.report.document import LARGEST_IMAGE, data_uri
from clustrs.evaluation.report.leaderboard import TEXT, Entry, model_section, overview, rank
from clustrs.evaluation.report.scores import figures, words
from clustrs.evaluation.report.tuning import TuningResult
from clustrs.evaluation.tasks import normalize_answer
from clustrs.models.draw import cluster_color, overlay_kept
from clustrs.palette import color
from clustrs.pruners import method_class

LISTED = 100  # disagreements that a list shows
HEAT = ("#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4")  # dark to light: they also work in gray
ENCODER = "attention of the vision encoder"
BEFORE = "attention of the language model before pruning"
AFTER = "after pruning, each survivor's over the tokens it stands for"
PLANE, MARGIN = 400, 28  # pixels of a drawing of tokens
FOLDERS = [Path(__file__).parent / "templates", Path(document.__file__).parent]
TEMPLATES = Environment(loader=FileSystemLoader(FOLDERS), autoescape=True, undefined=StrictUndefined)
TEMPLATES.filters["change"] = lambda share: f"{100 * (share - 1):+.0f} %".replace("-", "\N{MINUS SIGN}")
TEMPLATES.filters["short"] = lambda text, width: shorten(text, width, placeholder=" …")
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
THUMBNAIL = 112  # pixels


def in_bytes(count: int) -> str:
    return next((f"{count / size:.3g} {unit}" for unit, size in UNITS if count >= size), "0 B")


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(f"{template}.html.j2").render(**values)


def label(name: str) -> str:
    return "Unpruned" if name == NO_PRUNING else method_class(name).label


def kept_pictures(images: Sequence[Image.Image], answer: TrialAnswer) -> list[str]:
    """Draw the kept tokens over images, which are what the base crop shows; none before they are known."""
    pairs = zip(images, answer.images, strict=False)
    return [data_uri(overlay_kept(image, kept, size=LARGEST_IMAGE)) for image, kept in pairs]


def answer_card(
    answer: TrialAnswer, pictures: Sequence[str] = (), expected: str | None = None, others: Sequence[TrialAnswer] = ()
) -> str:
    """Render an answer, right if it is the expected one word for word, and its cost beside the unpruned model's."""
    correct = None if expected is None else normalize_answer(answer.text) == normalize_answer(expected)
    whole = next((one for one in others if one.method == NO_PRUNING), None)
    look = {"label": label(answer.method), "color": color(answer.method), "pictures": pictures}
    return render("answer", answer=answer, correct=correct, meter=meter(answer, whole), **look)


def meter(answer: TrialAnswer, whole: TrialAnswer | None) -> list[tuple[str, str, float | None, str]]:
    """Return tokens, time and memory of an answer: name, text, share of the unpruned model's, and parts."""
    lines: list[tuple[str, str, float | None, str]] = []
    if answer.placeholders:
        text = f"{answer.tokens:.4g} of {answer.placeholders}"
        inside = "mean over layers" if any(one.average is not None for one in answer.images) else ""
        lines.append(("Tokens", text, answer.tokens / answer.placeholders, inside))
    if answer.seconds is not None:
        named = {"encoder": answer.encode_seconds, "selection": answer.selection_seconds}
        named = {**named, "prefill": answer.prefill_seconds}
        parts = [f"{name} {1000 * (part or 0):.1f}" for name, part in named.items()]
        parts = [part for part in parts if answer.method != NO_PRUNING or not part.startswith("selection")]
        share = answer.seconds / whole.seconds if whole and whole.seconds else None
        lines.append(("First token", f"{1000 * answer.seconds:.0f} ms", share, " + ".join(parts) + " ms"))
    if answer.kv_bytes is not None:
        share = answer.kv_bytes / whole.kv_bytes if whole and whole.kv_bytes else None
        lines.append(("KV cache", in_bytes(answer.kv_bytes), share, ""))
    return lines


def thumbnail(image: Image.Image) -> str:
    return data_uri(ImageOps.fit(image, (THUMBNAIL, THUMBNAIL)), quality=70)


def preview(images: Sequence[Image.Image], caption: str) -> str:
    return render("preview", pictures=[data_uri(image) for image in images], caption=caption)


def draws(right: Mapping[str, int], seen: int, corruption: str, total: int) -> str:
    counts = [(label(name), color(name), count) for name, count in right.items()]
    return render("draws", counts=counts, seen=seen, corruption=corruption, total=total)


def inspection(result: Inspection) -> str:
    """Render the tokens of every view, with the data that the page's script needs to link them."""
    spans = []
    for name in ("px", "py"):
        values = [value for view in result.views for value in view.columns[name]]
        low, high = min(values), max(values)
        spans.append((low, high) if high > low else (low - 1, high + 1))
    (left, right), (low, high) = spans
    inner, names = PLANE - 2 * MARGIN, ("tile", "y", "x", "score", "kept", "cluster", "size", "px", "py")
    views = []
    for view in result.views:
        width, height = PLANE, round(PLANE * view.image.height / view.image.width)
        cell = round(width / view.grid[1], 3), round(height / view.grid[0], 3)
        tokens = [
            {
                "index": index,
                "tile": tile,
                "kept": kept,
                "color": "" if cluster is None else cluster_color(cluster),
                "size": size,
                "radius": round((0.5 * (size or 0) * cell[0] * cell[1] / np.pi) ** 0.5, 2),
                "place": f"row {y + 1}, column {x + 1}" + (f", crop {tile + 1}" if tile else ""),
                "score": f"{score:.3g}",
                "left": round(x * cell[0], 3),
                "top": round(y * cell[1], 3),
                "cx": round(MARGIN + inner * (px - left) / (right - left), 1),
                "cy": round(PLANE - MARGIN - inner * (py - low) / (high - low), 1),
            }
            for index, (tile, y, x, score, kept, cluster, size, px, py) in enumerate(
                zip(*map(view.columns.get, names), strict=True)
            )
        ]
        maps = [(ENCODER, *attention_map(view, "score"))]
        if "before" in view.columns:
            brightest = np.quantile(view.columns["before"], 0.99)
            for name, title in (("before", BEFORE), ("after", AFTER)):
                share = 100 * sum(view.columns[name])
                maps.append((f"{title}: {share:.0f} % go to the image", *attention_map(view, name, brightest)))
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
                "maps": [(title, data_uri(heat), f"{brightest:.2g}") for title, heat, brightest in maps],
            }
        )
    return render("inspection", views=views, clusters=result.clusters, shares=result.shares, label=label(result.method))


def attention_map(view: View, name: str, brightest: float | None = None) -> tuple[Image.Image, float]:
    """Draw a column over the base crop in gray; also return the value of the brightest color."""
    tile, y, x, score = (np.array(view.columns[one]) for one in ("tile", "y", "x", name))
    heat = np.zeros(view.grid)
    heat[y[tile == 0], x[tile == 0]] = score[tile == 0]
    brightest = brightest or float(np.quantile(heat, 0.99)) or 1.0  # a few outliers would leave all else black
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


def board(entries: Sequence[Entry], model: str | None) -> str:
    """Render the leaderboard of entries: methods over all models, or those of one model by budget."""
    ranked = rank(entries)
    if model is None:
        return render("board", text=TEXT, block=overview(ranked))
    text, table = model_section(model, ranked[model]).blocks
    return render("board", text=f"{TEXT} {getattr(text, 'text', '')}", block=table)


def tuned(result: TuningResult) -> str:
    result = result.spelled()
    by_budget, front = result.figures()
    return render("tuned", result=result, figures=(front, by_budget), size=document)
