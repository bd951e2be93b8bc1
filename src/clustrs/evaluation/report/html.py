"""Documents as one page that needs nothing else: no files, no network, and a script only for comfort."""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.evaluation.report import svg
from clustrs.evaluation.report.blocks import Bullets, Document, Figure, Gallery, Listing, Text
from clustrs.evaluation.report.escaping import plain
from clustrs.palette import dark_css

DRAWING = re.compile(r"data:image/(png|webp|jpeg);base64,[A-Za-z0-9+/]+={0,2}\Z")


def page(document: Document) -> str:
    """Render a document."""
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    checksum = b64encode(sha256(script.encode()).digest()).decode()
    template = environment().get_template("page.html.j2")
    text = {"script": Markup(script), "checksum": checksum, "dark_css": Markup(dark_css("figure"))}
    return template.render(document=document, draw=svg.draw, size=svg, **text) + "\n"


@cache
def environment() -> Environment:
    """Templates in which every text is made plain and escaped, whatever the result files hold."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, finalize=_plain
    )
    made.filters["drawing"] = _drawing
    kinds = {"text_block": Text, "bullets": Bullets, "listing": Listing, "figure_block": Figure, "gallery": Gallery}
    for name, kind in kinds.items():
        made.tests[name] = lambda block, kind=kind: isinstance(block, kind)
    return made


def _drawing(text: str) -> str:
    """An image inside the page, and nothing else that a file may name."""
    if not DRAWING.match(text):
        raise ValueError(f"drawing {text[:40]!r}: an image as a data URI is expected, draw the examples again")
    return text


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
