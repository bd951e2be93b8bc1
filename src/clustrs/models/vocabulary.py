"""Words that a model does not know: small models have one token per word, and one more for all other words."""

from difflib import get_close_matches
from typing import Any

NEAR = 0.8
"""How alike a known word must be to be proposed: `colour` for `color`, but not `list` for `it`."""


def unknown_words(processor: Any, text: str) -> list[str]:
    """The words of a text that the tokenizer maps to its unknown token, as they are written there, each once.

    Only a word-level tokenizer can have some. Others spell a word out of pieces, and nothing is lost of it.
    """
    from tokenizers.models import WordLevel

    core: Any = getattr(getattr(processor, "tokenizer", None), "backend_tokenizer", None)
    if core is None or not isinstance(core.model, WordLevel):
        return []
    unknown = core.token_to_id(core.model.unk_token)
    if unknown is None:
        return []
    encoded = core.encode(text, add_special_tokens=False)
    spans: list[tuple[int, int]] = []
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token != unknown:
            continue
        if spans and spans[-1][1] == start:  # 's is one word to a reader
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    written = (text[start:end] for start, end in spans)
    return list(dict.fromkeys(word.strip(".,;:!?") or word for word in written))


def name_unknown_words(processor: Any, text: str) -> str:
    """One line that names the words of a question that a model does not know; nothing if it knows them all."""
    unknown = unknown_words(processor, text)
    if not unknown:
        return ""
    known = [word for word in processor.tokenizer.get_vocab() if word.isalpha()]
    near = {word: get_close_matches(word.lower(), known, n=1, cutoff=NEAR) for word in unknown}
    named = ", ".join(f"{word!r}" + "".join(f" (did you mean {one!r}?)" for one in near[word]) for word in unknown)
    return f"I don't know the {'word' if len(unknown) == 1 else 'words'} {named}"
