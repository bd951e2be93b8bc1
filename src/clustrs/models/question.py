"""The question of an image: the text of the user's turn that holds it, found in the token ids of a prompt.

Inside `forward` and `generate` there are ids alone. The processor says which of them are special, and its chat template
in which words a user's turn begins and ends. What is left of the turn that holds an image is the question: without
those words, special tokens, placeholders, blank tokens at either end of a piece of text, and what the processor writes
before tiles and frames. Text before and after the image counts. Other turns and the system line do not.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from clustrs.models.adapters.base import Adapter, Source, VisualTokens
from clustrs.models.load import load_processor
from clustrs.models.prompt import mismatch

Question = str | Tensor | Sequence[str | Tensor]
"""A text, or its token ids [T]: one for all images of a call, or one for each."""
TEXTS = ("clustrs0", "clustrs1", "clustrs2")  # stand for what a user, the model and again the user say in a template
PLAIN = "USER: clustrs0 ASSISTANT: clustrs1 USER: clustrs2 ASSISTANT:"
"""The turns of LLaVA-1.5, for prompts without a turn of the template."""


class QuestionReader:
    """Reads the questions of a call's images; see the module for what counts.

    Args:
        model: The model; without a processor its own is loaded, from the folder or the local cache it came from.
        processor: The model's processor, or its tokenizer.
        question: A question that counts instead of those in the prompts; see `Question`.
        written: Regular expression of what the processor writes before tiles and frames, without spaces.
    """

    def __init__(self, model: Any, processor: Any, question: Question | None, written: str) -> None:
        given = question if isinstance(question, list | tuple) else [question]
        if question is not None and not (given and all(isinstance(one, str) or _is_ids(one) for one in given)):
            raise ValueError(f"question must be a text, token ids [T], or a list with one per image, got {question!r}")
        self.given, self.written = question, re.compile(f"(?:{written})$") if written else None
        if all(isinstance(one, Tensor) for one in given):
            return
        if processor is None:
            name = getattr(model, "name_or_path", "")
            try:
                processor = load_processor(name, local_files_only=True) if name else None
            except Exception:  # transformers raises many kinds
                processor = None
            if processor is None:
                raise ValueError(
                    "processor is missing: the question is found in a prompt by the model's chat template, and "
                    f"{name or type(model).__name__!r} has none on this machine (write attach(model, processor=...))"
                )
        self.tokenizer = getattr(processor, "tokenizer", processor)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.special = special - {self.tokenizer.unk_token_id}  # a word that the model does not know was still asked
        self._pieces: dict[int, str] = {}
        self.turns = [self._words(PLAIN)]
        if getattr(processor, "chat_template", None):
            roles = zip(("user", "assistant", "user"), TEXTS, strict=True)
            chat = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in roles]
            try:
                rendered = str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
                self.turns.insert(0, self._words(rendered))
            except Exception as error:  # a template is a program: it raises what it likes
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"the processor's chat template cannot be read for questions: {reason}") from error

    def _words(self, rendered: str) -> tuple[str, list[str]]:
        """Return the words that open a user's turn and those that may end it, from a conversation of TEXTS.

        Of a turn's opening those from the last special token on count, of an ending those up to the first one.
        """
        parts = [[i for i in self._ids(text) if self._piece(i)] for text in re.split("|".join(TEXTS), rendered)]
        first, second, third, last = parts
        shared = len(commonprefix([[self._piece(i) for i in reversed(part)] for part in (first, third)]))
        opening = third[len(third) - shared :]
        marks = [at for at, token in enumerate(opening) if token in self.special]
        enders = []
        for ending in (second, last):
            end = next((at + 1 for at, token in enumerate(ending) if token in self.special), len(ending))
            enders.append(self._text(ending[:end]))
        return self._text(opening[marks[-1] if marks else 0 :]), [ender for ender in dict.fromkeys(enders) if ender]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _piece(self, token: int) -> str:
        """Return the text of a token without spaces."""
        if token not in self._pieces:
            self._pieces[token] = "".join(self.tokenizer.decode([token]).split())
        return self._pieces[token]

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(map(self._piece, ids))

    def columns(self, ids: Sequence[int], real: Sequence[bool], first: int, last: int) -> list[int]:
        """Return the columns of the question in a prompt, whose image has its placeholders from `first` to `last`."""
        pieces = [self._piece(token) for token in ids]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece))
        text, edges = "".join(pieces), set(starts)
        begin, end = 0, starts[-1]
        for opener, enders in self.turns:
            found = [at for at in _places(text, opener, edges) if at + len(opener) <= starts[first]] if opener else []
            ends = [at for ender in enders for at in _places(text, ender, edges) if at >= starts[last + 1]]
            if found or ends:
                begin = found[-1] + len(opener) if found else 0
                end = min(ends, default=end)
                break
        inside = range(bisect_left(starts, begin), bisect_left(starts, end))
        runs: list[list[int]] = [[]]
        for column in inside:
            if ids[column] in self.special or not real[column]:
                runs.append([])
            else:
                runs[-1].append(column)
        kept: list[int] = []
        for i, run in enumerate(runs):
            if self.written is not None and i + 1 < len(runs) and run:
                written = self.written.search(text[starts[run[0]] : starts[run[-1] + 1]])
                if written is not None:
                    run = [column for column in run if starts[column] < starts[run[0]] + written.start()]
            says = [at for at, column in enumerate(run) if pieces[column]]
            kept += run[says[0] : says[-1] + 1] if says else []
        return kept

    def read(
        self, adapter: Adapter, prompt: Tensor, mask: Tensor | None, encoded: Sequence[VisualTokens | Source]
    ) -> list[Tensor]:
        """Return the embeddings [T, D] of each image's question, by the model's own table."""
        table = adapter.inner.get_input_embeddings()
        embedded: dict[tuple[int, ...], Tensor] = {}

        def embed(ids: Sequence[int]) -> Tensor:
            if tuple(ids) not in embedded:  # the same question is the same tensor: an image shares its selection
                embedded[tuple(ids)] = table(torch.tensor(ids, device=prompt.device)).detach()
            return embedded[tuple(ids)]

        if self.given is not None:
            given = self.given if isinstance(self.given, list | tuple) else [self.given] * len(encoded)
            if len(given) != len(encoded):
                raise ValueError(f"question must have one text for each of the {len(encoded)} images, got {len(given)}")
            asked = [self._ids(one) if isinstance(one, str) else one.tolist() for one in given]
        else:
            asked = self._found(adapter, prompt, mask, encoded)
        if not all(asked):
            raise ValueError(
                "the turn that holds the image has no text, so there is no question: ask one in it, or write "
                "attach(model, question=...)"
            )
        return [embed(ids) for ids in asked]

    def _found(
        self, adapter: Adapter, prompt: Tensor, mask: Tensor | None, encoded: Sequence[VisualTokens | Source]
    ) -> list[list[int]]:
        rows = prompt.tolist()
        reals = (torch.ones_like(prompt) if mask is None else mask).bool().tolist()
        found: list[list[int]] = [[] for _ in encoded]
        for modality in dict.fromkeys(image.modality for image in encoded):
            places = (prompt == adapter.placeholder(modality)).nonzero().tolist()
            start = 0
            for i, image in enumerate(encoded):
                if image.modality == modality:
                    own, start = places[start : start + image.slots], start + image.slots
                    if len(own) < image.slots or own[0][0] != own[-1][0]:
                        raise mismatch(len(places), start)
                    row = own[0][0]
                    columns = self.columns(rows[row], reals[row], own[0][1], own[-1][1])
                    found[i] = [rows[row][column] for column in columns]
        return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype in (torch.long, torch.int)


def _places(text: str, words: str, edges: set[int]) -> list[int]:
    """Return where words begin in a text, as whole tokens."""
    found = (match.start() for match in re.finditer(re.escape(words), text))
    return [at for at in found if at in edges and at + len(words) in edges]
