"""Text from records made harmless for the place where it is shown."""

import html
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


def plain(text: str) -> str:
    """One line without control characters, half characters, or marks that turn the direction of writing."""
    return "".join(
        " " if character.isspace() else "\ufffd" if unicodedata.category(character)[0] == "C" else character
        for character in text
    )


def for_html(text: str) -> str:
    return html.escape(plain(text), quote=True)


def for_markdown(text: str) -> str:
    text = "".join("\\" + character if character in MARKDOWN else character for character in plain(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def for_tex(text: str) -> str:
    """What pdflatex can set: ASCII and Western European letters, a question mark for the rest."""
    return "".join(TEX.get(c, c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in plain(text))


def short(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
