"""Methods that read the question."""

import math
from typing import Any

import numpy as np

from reference import Array, Image, Result
from reference.selection import cosine, only


def scaled_relevance(cosines: list[list[float]]) -> list[float]:
    """From the cosines of each token to those of the question: means, from about 0 to 1."""
    means = [math.fsum(row) / len(row) for row in cosines]
    span = max(max(means) - min(means), 1e-6)
    return [(mean - min(means) + 1e-6) / span for mean in means]


def first_of_best(gains: dict[int, float]) -> int:
    """The first of those that rounding cannot tell from the best: logarithms that differ by less than 1e-7."""
    best = max(gains.values())
    return min(i for i, gain in gains.items() if gain >= best - 1e-7)


def cdpruner(method: Any, image: Image, k: int) -> Result:
    """By what is left of each token after Gram and Schmidt have taken the chosen ones out of it.

    The determinant of a Gram matrix with one vector more grows by the squared length of its rest. Where no token has a
    rest, the most relevant are next.
    """
    assert image.question is not None
    relevance = scaled_relevance([[cosine(token, word) for word in image.question] for token in image.tokens])
    if method.theta is None:
        weight = [2 * math.log(r) for r in relevance]
    else:
        weight = [method.theta / (1 - method.theta) * r for r in relevance]
    largest = np.abs(image.tokens).max(axis=1, keepdims=True)
    rest: Array = image.tokens / np.where(largest > 0, largest, 1)
    lengths = np.linalg.norm(rest, axis=1, keepdims=True)
    rest = rest / np.where(lengths > 0, lengths, 1)
    chosen: list[int] = []
    while len(chosen) < k:
        squares = (rest**2).sum(1)
        left = [i for i in range(len(rest)) if i not in chosen]
        new = {i: weight[i] + math.log(squares[i]) for i in left if squares[i] > 1e-6}
        chosen.append(first_of_best(new or {i: weight[i] for i in left}))
        if new:
            direction = rest[chosen[-1]] / math.sqrt(squares[chosen[-1]])
            for _ in range(2):  # once more for what rounding left
                rest = rest - np.outer(rest @ direction, direction)
    return only(image, chosen)
