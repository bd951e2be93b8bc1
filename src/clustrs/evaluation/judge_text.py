"""Texts that go to a judge and come back: the prompt, the score in a reply, and the key removed from messages.

An answer under test cannot pose as a part of the prompt's table, and reading a reply takes time linear in its length.
"""

import base64
import html
import math
import re
import unicodedata
from pathlib import Path
from urllib.parse import unquote

LONGEST_SCORE = 200  # characters of a line that may be a score
NUMBER = r"[-+]?(?:[0-9]+(?:[.,][0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
DECORATION = r"[\s*_`|]*"
BARE = re.compile(rf"{DECORATION}(?:correctness\s*[:=|]?{DECORATION})?({NUMBER})\.?{DECORATION}", re.IGNORECASE)
"""A reply, or its last line, that is a score: "0.5", "**0.5**", "Correctness: 0.5"."""
LABELLED = re.compile(r"correctness\s*[:=]", re.IGNORECASE)
THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
SECRET_PIECE = 8  # characters of a secret that are removed even alone: servers like to repeat the beginning of a key
CODE = re.compile(r"\\+(?:u\{?0*|x)([0-9a-f]{2})\}?", re.IGNORECASE)  # an escape of Python, JSON or JavaScript


def prompt(question: str, answer: str, prediction: str) -> str:
    """Compose what the judge reads: the instruction, worked examples in a table, and the row to complete."""
    expected = answer.replace("<AND>", " AND ").replace("<OR>", " OR ")
    opening = Path(__file__).with_name("judge_prompt.txt").read_text(encoding="utf-8")
    return f"{opening}{_column(question)} | {_column(expected)} | ⟦{_column(prediction)}⟧ |"


def _column(text: str) -> str:
    """Make one line of a text, without control characters and the signs that part columns and enclose predictions."""
    text = " ".join(text.replace("|", "¦").replace("⟦", "[[").replace("⟧", "]]").split())
    return "".join("\ufffd" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") else sign for sign in text)


def read_score(reply: str) -> float | None:
    """Read the score of a reply that is a number, or ends in the only line "Correctness: 0.5"; None if it does not."""
    said = without_thinking(reply).strip()
    match = BARE.fullmatch(said) if len(said) <= LONGEST_SCORE else None
    if match is None and len(LABELLED.findall(said)) == 1:
        last = said.splitlines()[-1]
        match = BARE.fullmatch(last) if len(last) <= LONGEST_SCORE and LABELLED.search(last) else None
    score = float(match[1].replace(",", ".")) if match else math.nan
    return abs(score) if 0 <= score <= 1 else None


def without_thinking(reply: str) -> str:
    """Drop <think>...</think>, also where the end is missing or the beginning is."""
    parts: list[str] = []
    position, thinking = 0, False
    for tag in THINK_TAG.finditer(reply):
        if tag[1]:
            if not thinking:
                parts.clear()
            position, thinking = tag.end(), False
        elif not thinking:
            parts.append(reply[position : tag.start()])
            thinking = True
    return "".join(parts if thinking else [*parts, reply[position:]])


def redact(text: str, secret: str | None) -> str:
    """Replace words that hold a secret, or a part of it, by ***: as it is, quoted, escaped, in base64 or in hex."""
    if not secret:
        return text
    encoded = {secret.encode().hex()}
    for shift in range(3):  # where a group of three bytes begins depends on what is encoded before the secret
        inner = base64.b64encode(bytes(shift) + secret.encode()).decode().rstrip("=")[shift + bool(shift) : -1]
        encoded |= {inner, inner.translate(str.maketrans("+/", "-_"))}
    sizes = dict.fromkeys((form for form in encoded if len(form) >= SECRET_PIECE), 2 * SECRET_PIECE)
    sizes |= dict.fromkeys((secret, _unescape(secret)), SECRET_PIECE)
    pieces = {form[i : i + n].lower() for form, n in sizes.items() for i in range(max(1, len(form) - n + 1))}

    def shown(word: str) -> str:
        forms = word.lower(), _unescape(word).lower()
        return "***" if any(piece in form for form in forms for piece in pieces) else word

    return " ".join(map(shown, text.split(" ")))


def _unescape(text: str) -> str:
    """Undo escapes of URLs, HTML, Python and JSON, also where they are escaped themselves."""
    before = None
    while before != text:
        before, text = text, html.unescape(unquote(CODE.sub(lambda code: chr(int(code[1], 16)), text)))
    return text.replace("\\", "")
