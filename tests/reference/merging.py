"""ToMe."""

from typing import Any

import numpy as np

from reference import Array, Image, Result, best_first
from reference.selection import cosine


def tome(method: Any, image: Image, k: int) -> Result:
    features = image.keys[1:] if image.cls else image.keys
    if not features.size:
        features = image.tokens
    groups = [[i] for i in range(len(image.tokens))]
    while len(groups) > k:
        groups = merge_once(features, groups, min(len(groups) // 2, len(groups) - k))
    rows = [np.mean([image.tokens[i] for i in group], axis=0) for group in groups]
    labels = [next(row for row, group in enumerate(groups) if i in group) for i in range(len(image.tokens))]
    return Result(np.array(rows), [group[0] for group in groups], labels, merged=[len(group) > 1 for group in groups])


def merge_once(features: Array, groups: list[list[int]], count: int) -> list[list[int]]:
    """The groups after `count` at even positions went to the most similar ones at odd positions, by first token."""
    even, odd = groups[::2], groups[1::2]
    means = {group[0]: np.sum([features[i] for i in group], axis=0) / len(group) for group in groups}
    alike = [[cosine(means[a[0]], means[b[0]]) for b in odd] for a in even]
    target = [best_first(row)[0] for row in alike]
    going = best_first([max(row) for row in alike])[:count]
    merged = [[*b, *(i for a in going if target[a] == position for i in even[a])] for position, b in enumerate(odd)]
    staying = [group for a, group in enumerate(even) if a not in going]
    return sorted((sorted(group) for group in [*merged, *staying]), key=lambda group: group[0])
