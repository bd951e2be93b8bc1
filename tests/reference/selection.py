"""The other methods."""

import math
from typing import Any

import numpy as np

from reference import Array, Picture, Result, best_first
from reference.noise import uniform

COSINE_STEP = 2.0**-20


def cosine(a: Array, b: Array) -> float:
    """Rounded, so that equal cosines are equal; 0 with a row of zeros."""
    length = math.sqrt(float(np.sum(a**2))) * math.sqrt(float(np.sum(b**2)))
    return round(float(np.sum(a * b)) / length / COSINE_STEP) * COSINE_STEP if length > 0 else 0.0


def only(picture: Picture, kept: list[int]) -> Result:
    kept = sorted(kept)
    return Result(picture.tokens[kept], kept)


def everything(picture: Picture, with_clusters: bool) -> Result:
    n = len(picture.tokens)
    result = only(picture, list(range(n)))
    if with_clusters:
        result.labels, result.centroids, result.alpha = list(range(n)), picture.tokens, [1.0] * n
    return result


def fastervlm(method: Any, picture: Picture, k: int) -> Result:
    return only(picture, best_first(picture.attention)[:k])


def divprune(method: Any, picture: Picture, k: int) -> Result:
    tokens = picture.tokens
    n = len(tokens)
    far = [[1 - cosine(a, b) for b in tokens] for a in tokens]
    isolation = [min(far[i][j] for j in range(n) if j != i) for i in range(n)]
    chosen = [best_first(isolation)[0]]
    while len(chosen) < k:
        closest = {i: min(far[i][j] for j in chosen) for i in range(n) if i not in chosen}
        chosen.append(min(closest, key=lambda i: (-closest[i], i)))
    return only(picture, chosen)


def visionzip(method: Any, picture: Picture, k: int) -> Result:
    n = len(picture.tokens)
    first = 1 if picture.cls else 0
    contextual = max(1, 10 * k // 64) if k > 1 else 0
    dominant = k - contextual - first
    order = best_first(picture.attention)
    best = sorted(order[:dominant])
    rest = sorted(order[dominant:])
    rows = [picture.hidden[0]] if picture.cls else []
    rows += [picture.hidden[first + i] for i in best]
    labels = [-1] * n
    for row, i in enumerate(best):
        labels[i] = first + row
    targets: list[int] = []
    if contextual:
        step = max(1, len(rest) // contextual)
        targets = rest[::step][:contextual]
        groups: list[list[int]] = [[] for _ in targets]
        for i in rest:
            if i not in targets:
                alike = [cosine(picture.keys[first + i], picture.keys[first + t]) for t in targets]
                groups[best_first(alike)[0]].append(i)
        for row, (target, group) in enumerate(zip(targets, groups, strict=True)):
            merged = picture.hidden[first + target].copy()
            if group:
                merged = merged + np.mean([picture.hidden[first + i] for i in group], axis=0)
            rows.append(merged)
            for i in [target, *group]:
                labels[i] = first + dominant + row
    indices = [-1] * first + best + targets
    merged_rows = [False] * (first + dominant) + [True] * contextual
    return Result(np.array(rows) @ picture.projector, indices, labels, merged=merged_rows)


def vispruner(method: Any, picture: Picture, k: int) -> Result:
    patches = picture.hidden[1:] if picture.cls else picture.hidden
    important = int(k * method.important)
    order = best_first(picture.attention)
    rest = order[important:]
    cosines = [[cosine(a, b) for b in patches] for a in patches]
    while len(rest) > k - important:
        surplus = len(rest) - (k - important)
        even, odd = rest[::2], rest[1::2]
        alike = {i: max((cosines[i][j] for j in odd), default=-math.inf) for i in even}
        by_likeness = sorted(even, key=lambda i: -alike[i])
        rest = by_likeness[min(8, surplus, len(even)) :] + odd
    return only(picture, order[:important] + rest)


def random(method: Any, picture: Picture, k: int) -> Result:
    draws = [uniform(method.seed, 0, i) for i in range(len(picture.tokens))]
    return only(picture, best_first(draws)[:k])


def grid(method: Any, picture: Picture, k: int) -> Result:
    """Rows of the picture at even distances, and in each of them columns at even distances."""
    n = len(picture.tokens)
    side = math.isqrt(n)
    width = method.columns or (side if side**2 == n else n)
    height = n // width
    rows = max(1, -(-k // width), min(height, k, round(math.sqrt(k * height / width))))
    counts = [k * (row + 1) // rows - k * row // rows for row in range(rows)]
    kept = []
    for row, count in enumerate(counts):
        y = int((row + 0.5) * height / rows + 1e-9)
        kept += [y * width + int((column + 0.5) * width / count + 1e-9) for column in range(count)]
    return only(picture, kept)
