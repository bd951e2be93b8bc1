"""Documents as one page that needs nothing else: no scripts, no files, no network."""

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.evaluation.report.blocks import Document, Figure, Listing, Text
from clustrs.evaluation.report.escaping import plain
from clustrs.evaluation.report.svg import Drawing, draw


def page(document: Document) -> str:
    """Render a document."""
    numbers = count(1)

    def draw_next(figure: Figure) -> Drawing | None:
        return draw(figure, f"figure{next(numbers)}")

    return environment().get_template("page.html.j2").render(document=document, draw=draw_next) + "\n"


@cache
def environment() -> Environment:
    """Templates in which every text is made plain and escaped, whatever the result files hold."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, finalize=_plain
    )
    made.filters["svg"] = Markup  # our own drawings, whose texts matplotlib has escaped
    made.tests["text_block"] = lambda block: isinstance(block, Text)
    made.tests["listing"] = lambda block: isinstance(block, Listing)
    made.tests["figure_block"] = lambda block: isinstance(block, Figure)
    return made


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
