"""Rules of the methods inside the language model: one image, plain loops, float64."""

import numpy as np
from numpy.typing import NDArray

from reference import best_first

Array = NDArray[np.float64]


def fastv(attention: Array, k: int) -> list[int]:
    """The k tokens that the last prompt token attends to most: attention [n], mean over heads."""
    return sorted(best_first(attention)[:k])


def last_attention(query: Array, keys: Array) -> Array:
    """Attention [W] of the last prompt token, mean over heads: its query [heads, d], keys [W, heads, d]."""
    rows = []
    for head, own in enumerate(query):
        logits = [float(own @ key[head]) / np.sqrt(len(own)) for key in keys]
        weights = np.exp(np.array(logits) - max(logits))
        rows.append(weights / weights.sum())
    return np.array(rows).mean(0)


def pyramiddrop(queries: Array, keys: Array, image: list[int], k: int, shares: tuple[float, ...]) -> list[int]:
    """Queries [L, heads, d] of the last token and keys [L, W, heads, d] in each layer: what the last step leaves."""
    left, kept = list(range(keys.shape[1])), list(image)
    for share, count in zip(shares, pyramiddrop_counts(len(image), k, len(shares)), strict=True):
        layer = int(share * len(keys))
        attention = last_attention(queries[layer], keys[layer][left])
        kept = [kept[i] for i in fastv(np.array([attention[left.index(place)] for place in kept]), count)]
        left = [place for place in left if place not in image or place in kept]
    return [image.index(place) for place in kept]


def pyramiddrop_counts(n: int, k: int, steps: int) -> list[int]:
    """How many tokens each step leaves: the same ratio from step to step, and k at the end."""
    return [max(k, round(n * (k / n) ** (step / steps))) for step in range(1, steps)] + [k]


def dart(
    keys: Array, hidden: Array, image: list[int], text: list[int], k: int, own: int = 4, words: int = 4
) -> list[int]:
    """Keys [W, heads, d] and normalized hidden states [W, D] of a prompt; `image` and `text` are places in it."""
    norms = [sum(abs(float(value)) for value in keys[place].ravel()) for place in range(len(keys))]
    pivots = [image[i] for i in best_first([norms[place] for place in image])[: min(own, k)]]
    taken = list(pivots)
    pivots += [text[i] for i in best_first([norms[place] for place in text])[:words]]
    share = int(np.ceil((k - len(taken)) / len(pivots)))
    for pivot in pivots:
        a = hidden[pivot]
        left = [place for place in image if place not in taken]
        cosines = [float(a @ hidden[p] / (np.linalg.norm(a) * np.linalg.norm(hidden[p]))) for p in left]
        taken += [left[i] for i in best_first([-cosine for cosine in cosines])[:share]]
    return sorted(image.index(place) for place in taken[:k])
