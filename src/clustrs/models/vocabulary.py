"""Words that a model does not know: small models have one token per word, and one more for all other words."""

from typing import Any

from clustrs.validation import nearest


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
    return list(dict.fromkeys(text[start:end] for start, end in spans))


def name_unknown_words(processor: Any, text: str) -> str:
    """One line that names the words of a question that a model does not know; nothing if it knows them all."""
    unknown = unknown_words(processor, text)
    if not unknown:
        return ""
    known = [word for word in processor.tokenizer.get_vocab() if word.isalpha()]
    named = ", ".join(f"{word!r}{nearest(word.lower(), known)}" for word in unknown)
    return f"I don't know the {'word' if len(unknown) == 1 else 'words'} {named}"
