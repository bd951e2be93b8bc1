"""What a run writes, one JSON object per line: answers, and a judge's verdicts on them."""

from typing import Any

import msgspec


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: what was asked, of which method under which corruption, and what came back.

    `method` is what `Pruner.to_dict` returns. A failed answer has an `error` and no `text`.
    """

    item: str
    image: str
    kinds: list[str]
    question: str
    answer: str
    method: dict[str, Any]
    corruption: str
    seed: int
    text: str | None
    score: float | None
    kept: list[int] | None
    visual_tokens: int | None
    unpruned_tokens: int | None
    error: str | None


class VerdictRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict of a judge on one text. Without a mark, `score` is None and `error` says why."""

    item: str
    text: str
    judge: str
    round: int
    score: float | None
    error: str | None
