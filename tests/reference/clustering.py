"""ClustRS (C+H, RRS, salience), and RRS around other methods."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from reference import Array, Image, Result, best_first, run
from reference.noise import waiting_time

ROUNDING = 2.0**-18


def huber(radius: float, tau: float) -> float:
    return radius**2 / 2 if radius <= tau else tau * (radius - tau / 2)


def squared(a: Array, b: Array) -> float:
    return float(np.sum((a - b) ** 2))


def salience(tokens: Array, attention: Array) -> Array:
    norms = [math.sqrt(float(np.sum(token**2))) for token in tokens]
    mean_norm = sum(norms) / len(norms)
    factor = 2 * sum(attention) / len(attention)
    return np.array([a + factor * max(0.0, norm - mean_norm) for a, norm in zip(attention, norms, strict=True)])


def seeding(method: Any, tokens: Array, weight: Array, k: int) -> list[int]:
    seeds = [best_first(weight)[0]]
    nearest = [math.inf] * len(tokens)
    scale = scales(tokens)
    for step in range(k - 1):
        for i, token in enumerate(tokens):
            nearest[i] = min(nearest[i], residual(token, tokens[seeds[-1]], scale[i]) ** 2)
        chance = [
            weight[i] * (huber(math.sqrt(d), method.tau) if method.distance == "huber" else d)
            for i, d in enumerate(nearest)
        ]
        if any(p > 0 for p in chance):
            race = [p / waiting_time(method.seed, step, i) for i, p in enumerate(chance)]
            seeds.append(best_first(race)[0])
        else:
            seeds.append(next(i for i in best_first(weight) if i not in seeds))
    return seeds


def mean(members: list[int], tokens: Array, weight: Array) -> Array:
    """Weighted mean; members that weigh nothing together count equally."""
    total = sum(weight[i] for i in members)
    if total > 0:
        return np.sum([weight[i] / total * tokens[i] for i in members], axis=0)
    return np.sum([tokens[i] / len(members) for i in members], axis=0)


def scales(tokens: Array) -> list[float]:
    """How large each token's squared distances to the others are, about: what rounding is relative to.

    The last term is float64's own rounding, all there is when every token is the same.
    """
    center = np.mean(tokens, axis=0)
    norms = [squared(token, center) for token in tokens]
    own = 1e-24 * float(np.sum(tokens**2))
    return [norm + sum(norms) / len(norms) + own for norm in norms]


def assign(tokens: Array, centers: list[Array | None], scale: list[float]) -> list[int]:
    """The nearest center of each token: the first of those that rounding cannot tell apart."""
    labels = []
    for token, size in zip(tokens, scale, strict=True):
        far = [math.inf if center is None else squared(token, center) for center in centers]
        labels.append(next(j for j, d in enumerate(far) if d <= min(far) + ROUNDING * size))
    return labels


def refine(method: Any, tokens: Array, weight: Array, seeds: list[int]) -> tuple[list[int], list[Array | None]]:
    """Labels and centers after the last round."""
    scale = scales(tokens)
    centers: list[Array | None] = [tokens[i] for i in seeds]
    labels = [-1] * len(tokens)
    for _ in range(method.iterations):
        update = assign(tokens, centers, scale)
        changed = sum(new != old for new, old in zip(update, labels, strict=True))
        labels = update
        for j, center in enumerate(centers):
            members = [i for i, label in enumerate(labels) if label == j]
            if not members or center is None:
                centers[j] = None
            elif method.centroid == "mean":
                centers[j] = mean(members, tokens, weight)
            else:
                base = weight if sum(weight[i] for i in members) > 0 else np.ones(len(tokens))
                pull = [min(1.0, method.tau / r) if r > 0 else 1.0 for r in map(math.sqrt, _to(tokens, center))]
                centers[j] = mean(members, tokens, np.array([b * p for b, p in zip(base, pull, strict=True)]))
        if changed < method.tolerance * len(tokens):
            break
    return labels, centers


def _to(tokens: Array, center: Array) -> list[float]:
    return [squared(token, center) for token in tokens]


def representatives(
    labels: list[int], weight: Array, k: int, chosen: list[int | None] | None = None
) -> tuple[list[int], list[int]]:
    """One token for each cluster (the heaviest, or the one that is `chosen`), and the labels, clusters numbered in
    raster order of these tokens."""
    labels = list(labels)
    order = best_first(weight)
    kept: dict[int, int] = {}
    for j in range(k):
        members = [i for i in order if labels[i] == j]
        if members:
            one = None if chosen is None else chosen[j]
            kept[j] = members[0] if one is None else one
    for j in range(k):
        if j not in kept:
            kept[j] = next(i for i in order if i not in kept.values())
            labels[kept[j]] = j
    rank = {j: row for row, j in enumerate(sorted(kept, key=lambda j: kept[j]))}
    return sorted(kept.values()), [rank[label] for label in labels]


def residual(token: Array, center: Array, scale: float) -> float:
    """Distance from the center; one that rounding could make is none."""
    d = squared(token, center)
    return math.sqrt(d) if d > ROUNDING * scale else 0.0


def medoids(labels: list[int], tokens: Array, weight: Array, k: int) -> list[int | None]:
    """The member of each cluster nearest to its weighted mean: the first of those that rounding cannot tell apart."""
    scale = scales(tokens)
    nearest: list[int | None] = []
    for j in range(k):
        members = [i for i, label in enumerate(labels) if label == j]
        if not members:
            nearest.append(None)
            continue
        center = mean(members, tokens, weight)
        least = min(squared(tokens[i], center) for i in members)
        nearest.append(next(i for i in members if squared(tokens[i], center) <= least + ROUNDING * scale[i]))
    return nearest


def pow_weights(weight: Array, power: float) -> Array:
    top = max(weight)
    if power == 1:
        return weight
    return np.array([(w / top) ** power if top > 0 else 0.0 for w in weight])


def clustrs(method: Any, image: Image, k: int) -> Result:
    tokens, weight = image.tokens, image.attention
    if method.salience or (method.salience is None and not image.cls):
        weight = salience(tokens, weight)
    weight = pow_weights(weight, method.attention_power)
    seeds = seeding(method, tokens, weight, k)
    labels, _ = refine(method, tokens, weight, seeds)
    chosen = medoids(labels, tokens, weight, k) if method.representative == "medoid" else None
    kept, labels = representatives(labels, weight, k, chosen)
    return shrunk(tokens, weight, kept, labels, method.clip if method.shrink else None)


def denoise(method: Any, image: Image, k: int) -> Result:
    tokens, weight = image.tokens, image.attention
    inner = run(method.inner, image)
    asked = getattr(method.inner, "salience", None) if method.salience is None else method.salience
    if asked or (asked is None and not image.cls):
        weight = salience(tokens, weight)
    weight = pow_weights(weight, getattr(method.inner, "attention_power", 1.0))
    labels = inner.labels
    if labels is None:
        labels = assign(tokens, [tokens[i] for i in inner.indices], scales(tokens))
        for row, i in enumerate(inner.indices):
            labels[i] = row
    return shrunk(tokens, weight, inner.indices, labels, method.clip)


def shrunk(
    tokens: Array,
    weight: Array,
    kept: list[int],
    labels: list[int],
    clip: tuple[float, float] | None,
) -> Result:
    """The kept tokens, moved towards the means of their clusters."""
    scale = scales(tokens)
    clusters = [[m for m, label in enumerate(labels) if label == row] for row in range(len(kept))]
    centroids = [mean(members, tokens, weight) for members in clusters]
    radius = [residual(token, centroids[labels[m]], scale[m]) for m, token in enumerate(tokens)]
    rows, alphas = [], []
    for i, members, center in zip(kept, clusters, centroids, strict=True):
        alpha = 1.0
        if len(members) > 1 and clip is not None:
            alpha = min(max(rrs(radius[i], sorted(radius[m] for m in members)), clip[0]), clip[1])
        alphas.append(alpha)
        rows.append(alpha * tokens[i] + (1 - alpha) * center)
    return Result(np.array(rows), kept, labels, np.array(centroids), alphas)


def rrs(r: float, radii: list[float]) -> float:
    """delta^2 / (r^2 + delta^2), delta the median of a cluster's residuals."""
    delta = (radii[(len(radii) - 1) // 2] + radii[len(radii) // 2]) / 2
    return delta**2 / (r**2 + delta**2) if r > 0 or delta > 0 else 1.0


def clustermeans(method: Any, image: Image, k: int) -> Result:
    """The mean of each cluster, in the slot of the member nearest to the cluster's mean place."""
    tokens, weight = image.tokens, image.attention
    if method.salience or (method.salience is None and not image.cls):
        weight = salience(tokens, weight)
    weight = pow_weights(weight, method.power) if method.power else np.ones(len(tokens))
    rules = SimpleNamespace(tau=method.tau, distance="huber", centroid="mean", seed=method.seed)
    rules.iterations, rules.tolerance = method.iterations, method.tolerance
    labels, _ = refine(rules, tokens, weight, seeding(rules, tokens, weight, k))
    _, labels = representatives(labels, weight, k)
    n = len(tokens)
    side = math.isqrt(n) if math.isqrt(n) ** 2 == n else n
    places = image.layout or [(0, i // side, i % side) for i in range(n)]
    slots = []
    for j in range(k):
        members = [i for i in range(n) if labels[i] == j]
        heavy = dict(zip(members, _shares(members, weight), strict=True))
        mass: dict[int, float] = {}
        for i in members:
            mass[places[i][0]] = mass.get(places[i][0], 0.0) + heavy[i]
        tile = min(mass, key=lambda t: (-mass[t], t))
        where = {i: [float(places[i][axis]) for axis in (1, 2)] for i in members}
        if method.across_frames and image.frames is not None:
            numbers = sorted(set(image.frames))
            where = {i: [*where[i], float(numbers.index(image.frames[i]))] for i in members}
        else:
            members = [i for i in members if places[i][0] == tile]
        total = sum(heavy[i] for i in members)
        middle = [sum(heavy[i] / total * where[i][axis] for i in members) for axis in range(len(where[members[0]]))]
        far = {i: sum((a - b) ** 2 for a, b in zip(where[i], middle, strict=True)) for i in members}
        slots.append(next(i for i in members if far[i] <= min(far.values()) + 1e-9))
    order = sorted(range(k), key=lambda j: slots[j])
    groups = [[i for i in range(n) if labels[i] == j] for j in order]
    rows = [mean(members, tokens, weight) for members in groups]
    rank = {j: row for row, j in enumerate(order)}
    merged = [len(members) > 1 for members in groups]
    return Result(np.array(rows), [slots[j] for j in order], [rank[label] for label in labels], merged=merged)


def _shares(members: list[int], weight: Array) -> list[float]:
    """What each member contributes to the mean of its cluster."""
    total = sum(weight[i] for i in members)
    return [weight[i] / total if total > 0 else 1 / len(members) for i in members]
