"""What tests read of a report: the records of report.csv, and the tags and texts of the page."""

import csv
from html.parser import HTMLParser
from pathlib import Path

from clustrs.evaluation.report.document import DRAWING


def cells_of(folder: Path) -> dict[tuple[str, ...], dict[str, str]]:
    with (folder / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    key = ("method", "keep", "corruption", "level", "seed")
    found = {tuple(str(row[name]) for name in key): row for row in rows}
    assert len(found) == len(rows)
    return found


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a page loads or links, its tables and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.text: list[str] = []
        self.drawings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.check(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.check(attrs)

    def check(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "src" and DRAWING.match(str(value)):
                self.drawings.append(str(value))
                continue
            if name in ("href", "src", "xlink:href", "action") and not str(value).startswith("#"):
                self.outside.append(str(value))
            if name == "id":
                self.ids.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
