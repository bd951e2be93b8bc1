"""Text from result files made harmless for the place where it is shown."""

import re
import unicodedata

TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "`": r"\textasciigrave{}",
    "\N{EN DASH}": "--",
}
"""Brackets and stars would be taken for options of a line break before them."""
MARKDOWN = "\\`*_{}[]#!|~"


FORMULA = re.compile(r"(^|[;\t])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a spreadsheet would see the beginning of a formula, also in one that parts columns by semicolons."""


def plain(text: str) -> str:
    """Make one line without control characters, half characters, or marks that turn the direction of writing."""
    return "".join(
        " " if character.isspace() else "\ufffd" if unicodedata.category(character)[0] == "C" else character
        for character in text
    )


def for_markdown(text: str) -> str:
    """Escape whatever Markdown or HTML would give a meaning."""
    text = "".join("\\" + character if character in MARKDOWN else character for character in plain(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def for_tex(text: str) -> str:
    """Escape text for pdflatex: ASCII and Western European letters, a question mark for the rest."""
    return "".join(TEX.get(c, c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in plain(text))


def for_spreadsheet(text: str) -> str:
    """Put an apostrophe before what a spreadsheet would run as a formula."""
    return FORMULA.sub(r"\1'", plain(text))


def short(text: str, length: int = 200) -> str:
    """Cut a text off where it becomes too long."""
    return text if len(text) <= length else text[: length - 1] + "…"
