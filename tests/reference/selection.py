"""The other methods."""

import math
from typing import Any

import numpy as np

from reference import Array, Image, Result, best_first
from reference.noise import uniform

COSINE_STEP = 2.0**-20


def cosine(a: Array, b: Array) -> float:
    """Rounded, so that equal cosines are equal; 0 with a row of zeros."""
    length = math.sqrt(float(np.sum(a**2))) * math.sqrt(float(np.sum(b**2)))
    return round(float(np.sum(a * b)) / length / COSINE_STEP) * COSINE_STEP if length > 0 else 0.0


def only(image: Image, kept: list[int]) -> Result:
    kept = sorted(kept)
    return Result(image.tokens[kept], kept)


def everything(image: Image, with_clusters: bool) -> Result:
    n = len(image.tokens)
    result = only(image, list(range(n)))
    if with_clusters:
        result.labels, result.centroids, result.alpha = list(range(n)), image.tokens, [1.0] * n
    return result


def fastervlm(method: Any, image: Image, k: int) -> Result:
    return only(image, best_first(image.attention)[:k])


def divprune(method: Any, image: Image, k: int) -> Result:
    tokens = image.tokens
    n = len(tokens)
    far = [[1 - cosine(a, b) for b in tokens] for a in tokens]
    isolation = [min(far[i][j] for j in range(n) if j != i) for i in range(n)]
    chosen = [best_first(isolation)[0]]
    while len(chosen) < k:
        closest = {i: min(far[i][j] for j in chosen) for i in range(n) if i not in chosen}
        chosen.append(min(closest, key=lambda i: (-closest[i], i)))
    return only(image, chosen)


def visionzip(method: Any, image: Image, k: int) -> Result:
    n = len(image.tokens)
    first = 1 if image.cls else 0
    contextual = max(1, 10 * k // 64) if k > 1 else 0
    dominant = k - contextual - first
    order = best_first(image.attention)
    best = sorted(order[:dominant])
    rest = sorted(order[dominant:])
    rows = [image.hidden[0]] if image.cls else []
    rows += [image.hidden[first + i] for i in best]
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
                alike = [cosine(image.keys[first + i], image.keys[first + t]) for t in targets]
                groups[best_first(alike)[0]].append(i)
        for row, (target, group) in enumerate(zip(targets, groups, strict=True)):
            merged = image.hidden[first + target].copy()
            if group:
                merged = merged + np.mean([image.hidden[first + i] for i in group], axis=0)
            rows.append(merged)
            for i in [target, *group]:
                labels[i] = first + dominant + row
    indices = [-1] * first + best + targets
    merged_rows = [False] * (first + dominant) + [True] * contextual
    return Result(np.array(rows) @ image.projector, indices, labels, merged=merged_rows)


def vispruner(method: Any, image: Image, k: int) -> Result:
    patches = image.hidden[1:] if image.cls else image.hidden
    important = int(k * method.important)
    order = best_first(image.attention)
    rest = order[important:]
    cosines = [[cosine(a, b) for b in patches] for a in patches]
    while len(rest) > k - important:
        surplus = len(rest) - (k - important)
        even, odd = rest[::2], rest[1::2]
        alike = {i: max((cosines[i][j] for j in odd), default=-math.inf) for i in even}
        by_likeness = sorted(even, key=lambda i: -alike[i])
        rest = by_likeness[min(8, surplus, len(even)) :] + odd
    return only(image, order[:important] + rest)


def random(method: Any, image: Image, k: int) -> Result:
    draws = [uniform(method.seed, 0, i) for i in range(len(image.tokens))]
    return only(image, best_first(draws)[:k])


def grid(method: Any, image: Image, k: int) -> Result:
    """Rows of the image at even distances, and in each of them columns at even distances."""
    n = len(image.tokens)
    side = math.isqrt(n)
    width = method.columns or (side if side**2 == n else n)
    height = n // width
    rows = max(1, -(-k // width), min(height, k, round(math.sqrt(k * height / width))))
    counts = [k * (row + 1) // rows - k * row // rows for row in range(rows)]
    kept = []
    for row, count in enumerate(counts):
        y = int((row + 0.5) * height / rows + 1e-9)
        kept += [y * width + int((column + 0.5) * width / count + 1e-9) for column in range(count)]
    return only(image, kept)
