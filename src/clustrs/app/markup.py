"""The HTML parts of the page: cards, tables, curves, tokens. All texts are escaped."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from clustrs.app.inspection import Inspection, Token, View
from clustrs.app.results import Disagreement, OpenRun
from clustrs.app.trial import NO_PRUNING, PREVIEW, TrialAnswer, data_uri, saved_share, verdict
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.report import charts
from clustrs.evaluation.report.scores import figures, words
from clustrs.models.draw import overlay_kept
from clustrs.palette import color
from clustrs.pruners import method_class

LISTED = 100
"""Disagreements that a list shows."""
HEAT = ("#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4")
"""Colors of an attention map, from no attention to much: dark to light, so that they also work in gray."""
PLANE = 400
MARGIN = 28


@cache
def environment() -> Environment:
    """Return templates in which every text is escaped."""
    made = Environment(
        loader=FileSystemLoader([Path(__file__).parent / "templates", Path(charts.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    made.filters["milliseconds"] = lambda seconds: "\N{EN DASH}" if seconds is None else f"{1000 * seconds:.1f} ms"
    made.filters["bytes"] = readable_bytes
    made.filters["short"] = lambda text, width: shorten(text, width, placeholder=" …")
    return made


def render(template: str, **values: Any) -> str:
    return environment().get_template(f"{template}.html.j2").render(**values)


def readable_bytes(count: int | None) -> str:
    """Format bytes in the largest unit that leaves a number of at least 1."""
    if count is None:
        return "\N{EN DASH}"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def label(name: str) -> str:
    """Return the display name of a method."""
    return "Unpruned" if name == NO_PRUNING else method_class(name).label


def kept_picture(image: Image.Image, answer: TrialAnswer) -> str:
    """Draw the kept tokens over `image`, which is what the base crop shows; "" before they are known."""
    return "" if answer.image is None else data_uri(overlay_kept(image, answer.image, size=PREVIEW))


def answer_card(answer: TrialAnswer, picture: str, expected: str | None, others: Sequence[TrialAnswer]) -> str:
    """Render a method's answer; `picture` is from `kept_picture`, `others` are all answers so far."""
    return render(
        "answer",
        answer=answer,
        label=label(answer.method),
        color=color(answer.method),
        picture=picture,
        correct=verdict(answer.text, expected),
        saved=None if answer.method == NO_PRUNING else saved_share(others, answer),
    )


def waiting_card(method: str) -> str:
    """Render the card of a method that has not begun."""
    return answer_card(TrialAnswer(method), "", None, ())


def preview(image: Image.Image, caption: str) -> str:
    return render("preview", picture=data_uri(image), caption=caption)


def inspection(result: Inspection) -> str:
    """Render the tokens of every view, with the data that the page's script needs to link them."""
    spans = [_span([getattr(t, name) for view in result.views for t in view.tokens]) for name in ("px", "py")]
    views = [_view(index, view, spans) for index, view in enumerate(result.views)]
    return render("inspection", views=views, clusters=result.clusters, shares=result.shares, label=label(result.method))


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of some coordinates; never empty."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _view(index: int, view: View, spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return a view as the template draws it, in the units of its two drawings."""
    rows, columns = view.grid
    width, height = PLANE, round(PLANE * view.image.height / view.image.width)
    cell = round(width / columns, 3), round(height / rows, 3)
    tokens = [_token(i, token, cell, spans) for i, token in enumerate(view.tokens)]
    drawn = [one for one, token in zip(tokens, view.tokens, strict=True) if token.tile == 0]
    first = next((one for one in drawn if one["kept"]), None)
    if first is not None:
        first["first"] = True
    heat, brightest = attention_map(view)
    return {
        "index": index,
        "title": view.title,
        "note": view.note,
        "tokens": tokens,
        "drawn": sorted(drawn, key=lambda one: one["kept"]),
        "points": sorted(tokens, key=lambda one: one["kept"]),
        "kept": sum(token.kept for token in view.tokens),
        "columns": json.dumps(view.columns()),
        "picture": data_uri(view.image),
        "attention": data_uri(heat),
        "brightest": f"{brightest:.2g}",
        "width": width,
        "height": height,
        "cell": cell,
    }


def _token(index: int, token: Token, cell: tuple[float, float], spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    (left, right), (low, high) = spans
    inner = PLANE - 2 * MARGIN
    return {
        "index": index,
        "kept": token.kept,
        "first": False,
        "place": f"row {token.y + 1}, column {token.x + 1}" + (f", crop {token.tile + 1}" if token.tile else ""),
        "score": f"{token.score:.3g}",
        "left": round(token.x * cell[0], 3),
        "top": round(token.y * cell[1], 3),
        "cx": round(MARGIN + inner * (token.px - left) / (right - left), 1),
        "cy": round(PLANE - MARGIN - inner * (token.py - low) / (high - low), 1),
    }


def attention_map(view: View) -> tuple[Image.Image, float]:
    """Draw the scores of the base crop over the gray image; also return the score of the brightest color.

    That is the 99th percentile: a few outliers would leave all else black.
    """
    heat = np.zeros(view.grid)
    for token in view.tokens:
        if token.tile == 0:
            heat[token.y, token.x] = token.score
    brightest = float(np.quantile(heat, 0.99)) or 1.0
    stops = np.array([[int(tone[i : i + 2], 16) for i in (1, 3, 5)] for tone in HEAT])
    level = np.clip(heat / brightest, 0, 1) * (len(HEAT) - 1)
    tones = np.stack([np.interp(level, range(len(HEAT)), stops[:, channel]) for channel in range(3)], -1)
    gray = view.image.convert("L").convert("RGB")
    gray.thumbnail((PREVIEW, PREVIEW))
    layer = Image.fromarray(tones.round().astype(np.uint8)).resize(gray.size, Image.Resampling.NEAREST)
    return Image.blend(gray, layer, 0.7), brightest


def curves(opened: OpenRun, corruption: str, budget: str) -> str:
    """Render the score against the level, for one corruption and budget; "" where images were not corrupted."""
    section = figures(opened.summary)
    for figure in section.blocks if section else ():
        if isinstance(figure, charts.Figure) and figure.x_label.removesuffix(" level") == corruption:
            panels = tuple(panel for panel in figure.panels if panel.title == f"keep {budget}")
            shown = replace(figure, panels=panels)
            return render("curves", block=shown, drawing=charts.draw(shown), size=charts)
    return ""


def cells(opened: OpenRun, corruption: str, budget: str, chosen: tuple[int, int] | None = None) -> str:
    """Render a table of means with a row per level and a column per method; each number is a button."""
    run, summary = opened.run, opened.summary
    methods = opened.methods(budget)
    rows = [
        {
            "condition": condition,
            "title": run.conditions[condition].level_text or "clean",
            "cells": [
                {"method": m, "label": opened.label(m), "value": summary.value(summary.estimates[m][condition])}
                for m in methods
            ],
        }
        for condition in opened.conditions(corruption)
    ]
    return render(
        "cells",
        unit=summary.unit,
        budget=budget,
        head="" if corruption == CLEAN else words(corruption),
        methods=[{"label": opened.label(m), "color": color(run.methods[m].name)} for m in methods],
        rows=rows,
        chosen=chosen,
    )


def disagreement_list(found: Sequence[Disagreement], first: str, second: str, condition: str) -> str:
    better = sum(one.first.score > one.second.score for one in found)
    return render(
        "disagreements",
        listed=found[:LISTED],
        total=len(found),
        first_better=better,
        first=first,
        second=second,
        condition=condition,
    )


def disagreement(one: Disagreement, pictures: Sequence[Image.Image | None], note: str) -> str:
    """Render one question with both answers; `pictures` show the tokens that each method kept."""
    sides = []
    for said, picture in zip((one.first, one.second), pictures, strict=True):
        sides.append(
            {
                "label": said.label,
                "color": color(said.method),
                "sub": "all tokens" if not said.kept else f"{len(said.kept)} tokens kept",
                "picture": "" if picture is None else data_uri(picture),
                "alt": f"Image {one.image} with the tokens that {said.label} kept",
                "text": said.text,
                "score": said.score,
            }
        )
    return render("disagreement", one=one, sides=sides, note=note)
