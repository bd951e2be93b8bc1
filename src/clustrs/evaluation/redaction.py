"""Secrets taken out of text that others wrote, however they escaped them."""

import base64
import html
import re
from itertools import groupby
from urllib.parse import quote

WINDOW = 8
"""A piece of a secret that is this long is taken out too: servers like to repeat only the beginning of a key."""
ESCAPE = re.compile(
    r"%(?:25)*(?P<percent>[0-9a-f]{2})|\\+u\{?0*(?P<unicode>[0-9a-f]{2})\}?|\\+x(?P<byte>[0-9a-f]{2})"
    r"|&(?:amp;)*(?P<entity>#x?[0-9a-f]+|[a-z]+);|\\+(?P<character>.)|(?P<plain>.)",
    re.IGNORECASE | re.DOTALL,
)


def redact(text: str, secret: str | None) -> str:
    """Replace a secret by ***: as it is, URL-quoted, escaped as in JSON, Python or HTML, in base64 and in hex."""
    if not secret:
        return text
    forms = _forms(secret)
    literal = [(character.lower()[:1], i, i + 1) for i, character in enumerate(text)]
    decoded = [(_decode(match), match.start(), match.end()) for match in ESCAPE.finditer(text)]
    hidden = bytearray(len(text))
    for sequence in (literal, decoded):
        content = "".join(character for character, _, _ in sequence)
        for size, pieces in forms.items():
            for start in range(len(content) - size + 1):
                if content[start : start + size] in pieces:
                    first, last = sequence[start][1], sequence[start + size - 1][2]
                    hidden[first:last] = b"\1" * (last - first)
    runs = groupby(zip(text, hidden, strict=True), key=lambda pair: pair[1])
    return "".join("***" if hide else "".join(character for character, _ in run) for hide, run in runs)


def _forms(secret: str) -> dict[int, set[str]]:
    """Pieces of the secret and of its encodings in lower case, by their length."""
    raw = secret.encode()
    forms = [quote(secret, safe=""), raw.hex()]
    for shift in range(3):  # where a group of three bytes begins depends on what is encoded before the secret
        encoded = base64.b64encode(b"\0" * shift + raw).decode().rstrip("=")
        middle = encoded[shift + bool(shift) : len(encoded) - bool((shift + len(raw)) % 3)]
        forms += [middle, middle.translate(str.maketrans("+/", "-_"))]
    pieces: dict[int, set[str]] = {}
    for form in [secret, *(form for form in forms if len(form) >= WINDOW)]:
        size = min(WINDOW if form == secret else 2 * WINDOW, len(form))
        windows = {form[i : i + size].lower() for i in range(len(form) - size + 1)}
        pieces.setdefault(size, set()).update(windows)
    return pieces


def _decode(match: re.Match[str]) -> str:
    """The one character that an escape stands for, in lower case."""
    code = match["percent"] or match["unicode"] or match["byte"]
    if code:
        return chr(int(code, 16)).lower()
    if match["entity"]:
        character = html.unescape(f"&{match['entity']};")
        return character.lower() if len(character) == 1 else "\0"
    return (match["character"] or match["plain"]).lower()[:1]
