"""Methods that look at the frames of a video."""

import math
from typing import Any

import numpy as np

from reference import Image, Result
from reference.selection import all_cosines, divide, only

STEP = 2.0**-36


def evs(method: Any, image: Image, k: int) -> Result:
    """The tokens least like the one at the same place of the frame before; those without one come first."""
    n = len(image.tokens)
    side = math.isqrt(n) if math.isqrt(n) ** 2 == n else n
    places = image.layout or [(0, i // side, i % side) for i in range(n)]
    frames = image.frames or [0] * n
    change = []
    for i in range(n):
        before = [j for j in range(n) if places[j][1:] == places[i][1:] and frames[j] < frames[i]]
        if before:
            last = max(before, key=lambda j: frames[j])
            change.append(1 - all_cosines(image.tokens[[i, last]])[0][1])
        else:
            change.append(math.inf)
    order = sorted(range(n), key=lambda i: (-change[i], frames[i], i))
    return only(image, order[:k])


def vidcom2(method: Any, image: Image, k: int) -> Result:
    """The tokens least like the means of the video and of their frame; unusual frames get more."""
    tokens, n = image.tokens, len(image.tokens)
    frames = image.frames or [0] * n
    variance = [np.float32(np.var(column - column[0])) for column in tokens.T]
    few = sorted(sorted(range(len(variance)), key=lambda c: variance[c])[: max(1, len(variance) // 2)])
    rows = [row[few] / (np.linalg.norm(row[few]) or 1.0) for row in tokens]

    def likeness(i: int, center: Any) -> float:
        far = float(((rows[i] - center) ** 2).sum())
        return round(sum(math.exp(-far / (2 * b)) for b in (1 / 8, 1 / 4, 1 / 2, 1, 2)) / STEP) * STEP

    numbers = sorted(set(frames))
    groups = [[i for i in range(n) if frames[i] == number] for number in numbers]
    middle = sum(rows) / n
    to_video = [likeness(i, middle) for i in range(n)]
    score: dict[int, float] = {}
    for members in groups:
        middle = sum(rows[i] for i in members) / len(members)
        score |= {i: to_video[i] + likeness(i, middle) for i in members}
    usual = [round(math.fsum(to_video[i] for i in members) / len(members) / STEP) * STEP for members in groups]
    unique = [math.exp(-(value - min(usual)) / 0.01) for value in usual]
    unique = [value / math.fsum(unique) for value in unique]
    share = [(1 + p - 1 / len(groups)) * len(members) for p, members in zip(unique, groups, strict=True)]
    shares = [round(part / math.fsum(share) * 2**32) for part in share]
    budget = divide(shares, [len(members) for members in groups], k)
    kept = [i for members, b in zip(groups, budget, strict=True) for i in sorted(members, key=lambda i: score[i])[:b]]
    return only(image, kept)
