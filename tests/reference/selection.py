"""The other methods."""

import math
from typing import Any

import numpy as np

from reference import Array, Image, Result, best_first
from reference.noise import uniform


def cosine(a: Array, b: Array) -> float:
    """From sums that are rounded once, at the end; 0 with a row of zeros."""
    dot, left, right = (math.fsum((x * y).tolist()) for x, y in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(left * right) if left * right > 0 else 0.0


def all_cosines(tokens: Array) -> list[list[float]]:
    """The same as `cosine` for all pairs, each computed once."""
    n = len(tokens)
    alike = [[0.0] * n for _ in tokens]
    squares = [math.fsum((token**2).tolist()) for token in tokens]
    for i in range(n):
        products = (tokens[i] * tokens[i:]).tolist()
        for j in range(i, n):
            size = squares[i] * squares[j]
            alike[i][j] = alike[j][i] = math.fsum(products[j - i]) / math.sqrt(size) if size > 0 else 0.0
    return alike


def divide(shares: list[int], sizes: list[int], k: int) -> list[int]:
    """Divide k by shares of 2^32; what rounding leaves, and what a part has no room for, goes to the largest shares."""
    budget = [share * k // 2**32 for share in shares]
    for part in best_first(shares)[: k - sum(budget)]:
        budget[part] += 1
    surplus = sum(max(0, b - size) for b, size in zip(budget, sizes, strict=True))
    budget = [min(b, size) for b, size in zip(budget, sizes, strict=True)]
    for part in best_first(shares):
        more = min(surplus, sizes[part] - budget[part])
        budget[part], surplus = budget[part] + more, surplus - more
    return budget


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
    n = len(image.tokens)
    alike = all_cosines(image.tokens)
    isolation = [-max(alike[i][j] for j in range(n) if j != i) for i in range(n)]
    chosen = [best_first(isolation)[0]]
    closest = {i: alike[i][chosen[0]] for i in range(n)}
    while len(chosen) < k:
        closest = {i: max(c, alike[i][chosen[-1]]) for i, c in closest.items() if i not in chosen}
        chosen.append(min(closest, key=lambda i: (closest[i], i)))
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
    cosines = all_cosines(patches)
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
    """On each tile, or on the whole image, lines at even distances, and on each of them columns at even distances."""
    n = len(image.tokens)
    layout = image.layout
    if layout is None or method.columns is not None:
        side = math.isqrt(n)
        width = method.columns or (side if side**2 == n else n)
        return only(image, spread(list(range(n)), n // width, width, k))
    kept, seen, used = [], 0, 0
    for tile in sorted({place[0] for place in layout}):
        members = sorted((i for i in range(n) if layout[i][0] == tile), key=lambda i: layout[i][1:])
        ys, xs = ([layout[i][axis] for i in members] for axis in (1, 2))
        height, width = max(ys) - min(ys) + 1, max(xs) - min(xs) + 1
        if height * width != len(members):
            height, width = 1, len(members)
        seen += len(members)
        share = k * seen // n - used
        used += share
        if share:
            kept += spread(members, height, width, share)
    return only(image, kept)


def spread(members: list[int], height: int, width: int, k: int) -> list[int]:
    """k of the members of a grid, which come in raster order."""
    lines = max(1, -(-k // width), min(height, k, round(math.sqrt(k * height / width))))
    counts = [k * (line + 1) // lines - k * line // lines for line in range(lines)]
    kept = []
    for line, count in enumerate(counts):
        y = int((line + 0.5) * height / lines + 1e-9)
        kept += [members[y * width + int((column + 0.5) * width / count + 1e-9)] for column in range(count)]
    return kept


def mmr(method: Any, image: Image, k: int) -> Result:
    n = len(image.tokens)
    alike = all_cosines(image.tokens)
    low, high = min(image.attention), max(image.attention)
    importance = [(a - low) / (high - low) if high > low else 0.0 for a in image.attention]
    chosen = [best_first(importance)[0]]
    while len(chosen) < k:
        left = [i for i in range(n) if i not in chosen]
        value = {
            i: method.importance * importance[i] - (1 - method.importance) * max(alike[i][j] for j in chosen)
            for i in left
        }
        chosen.append(max(left, key=lambda i: (value[i], -i)))
    return only(image, chosen)


def scope(method: Any, image: Image, k: int) -> Result:
    features = image.hidden[1:] if image.cls else image.hidden
    alike = np.array(all_cosines(features if features.size else image.tokens))
    covered = np.zeros(len(alike))
    chosen: list[int] = []
    while len(chosen) < k:
        gain = [float(np.maximum(0, row - covered).sum()) for row in alike]
        value = [g * float(a) ** method.alpha for g, a in zip(gain, image.attention, strict=True)]
        chosen.append(next(i for i in best_first(value) if i not in chosen))
        covered = np.maximum(covered, alike[chosen[-1]])
    return only(image, chosen)


def holov(method: Any, image: Image, k: int) -> Result:
    n = len(image.tokens)
    count = min(method.runs, n)
    runs, start = [], 0
    for run in range(count):
        stop = start + n // count + (run < n % count)
        runs.append(list(range(start, stop)))
        start = stop
    scores = [run_score(image, run) for run in runs]
    total = math.fsum(scores)
    shares = [round((score / total if total > 0 else 1 / count) * 2**32) for score in scores]
    budget = divide(shares, [len(run) for run in runs], k)
    kept = [run[i] for run, b in zip(runs, budget, strict=True) for i in best_first(image.attention[run])[:b]]
    return only(image, kept)


def run_score(image: Image, run: list[int]) -> float:
    """The mean of 1000 a + 0.09 V of a run, V the variance of a token's cosines, scaled to the mean of 1000 a."""
    n = len(run)
    alike = all_cosines(image.tokens[run])
    variances = []
    for i in range(n):
        row = [0.0 if i == j else alike[i][j] for j in range(n)]
        mean = math.fsum(row) / max(1, n - 1)
        variances.append(math.fsum((value - mean) ** 2 for value in row) / max(1, n - 1))
    attention = [1000 * float(image.attention[i]) for i in run]
    scale = (math.fsum(attention) / n) / (math.fsum(variances) / n + 1e-6)
    return math.fsum(a + 0.09 * v * scale for a, v in zip(attention, variances, strict=True)) / n
