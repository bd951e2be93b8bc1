"""Methods that read further layers of the encoder, and Downsample: rules over the grid."""

import math
from typing import Any

import numpy as np

from reference import Array, Image, Result, best_first
from reference.selection import cosine, only

Place = tuple[int, int, int]


def places(image: Image) -> list[Place]:
    """Tile, y and x of each token; a square, or one line, if there is no layout."""
    n = len(image.tokens)
    side = math.isqrt(n) if math.isqrt(n) ** 2 == n else n
    return image.layout or [(0, i // side, i % side) for i in range(n)]


def grids(image: Image) -> dict[int, tuple[list[int], int, int]]:
    """For each tile its tokens in raster order and the height and width of its grid: one line, if it is none."""
    spots, found = places(image), {}
    for tile in sorted({spot[0] for spot in spots}):
        members = sorted((i for i in range(len(spots)) if spots[i][0] == tile), key=lambda i: spots[i][1:])
        height, width = (len(range(min(a), max(a) + 1)) for a in zip(*(spots[i][1:] for i in members), strict=True))
        found[tile] = members, *((height, width) if height * width == len(members) else (1, len(members)))
    return found


def hiprune(method: Any, image: Image, k: int) -> Result:
    spots, middle = places(image), best_first(image.object_scores)
    anchors = middle[: max(1, round(k * method.objects / 5))]
    around = {
        (tile, y + dy, x + dx)
        for tile, y, x in (spots[i] for i in anchors)
        for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0))
    }
    buffers = [i for i in middle if spots[i] in around and i not in anchors]
    registers = [i for i in best_first(image.received) if i not in anchors and i not in buffers]
    return only(image, (anchors + buffers + registers)[:k])


def vscan(method: Any, image: Image, k: int) -> Result:
    windows: dict[Place, list[int]] = {}
    for tile, (members, height, width) in grids(image).items():
        for position, i in enumerate(members):
            y, x = position // width * method.windows // height, position % width * method.windows // width
            windows.setdefault((tile, y, x), []).append(i)
    ranked = [sorted(members, key=lambda i: (-image.early_scores[i], i)) for members in windows.values()]
    turn = {i: count for members in ranked for count, i in enumerate(members)}
    local = sorted(turn, key=lambda i: (turn[i], -image.early_scores[i], i))[: k // 2]
    kept = sorted(local + [i for i in best_first(image.attention) if i not in local][: k - k // 2])
    groups: list[list[int]] = [[] for _ in kept]
    labels = []
    for i in range(len(image.tokens)):
        alike = [cosine(image.tokens[i], image.tokens[j]) for j in kept]
        labels.append(kept.index(i) if i in kept else best_first(alike)[0])
        groups[labels[-1]].append(i)
    rows = np.array([image.tokens[group].mean(0) for group in groups])
    return Result(rows, kept, labels, merged=[len(group) > 1 for group in groups])


def prumerge_plus(method: Any, image: Image, k: int) -> Result:
    n, hidden = len(image.tokens), image.hidden[1:] if image.cls else image.hidden
    order = best_first(image.joint_scores)
    attended, rest = order[: k - k // 2], sorted(order[k - k // 2 :])
    even = rest[:: max(1, len(rest) // max(1, k // 2))][: k // 2]
    kept = sorted(attended + even)
    rows = []
    for i in kept:
        alike = {j: cosine(image.joint_keys[i], image.joint_keys[j]) for j in range(n) if j != i}
        near = sorted(alike, key=lambda j: (-alike[j], j))[: method.neighbors]
        rows.append(hidden[i] + sum((image.joint_scores[j] * hidden[j] for j in near), np.zeros_like(hidden[i])))
    return Result(np.array(rows) @ image.projector, kept, merged=[True] * k)


def downsample(method: Any, image: Image, k: int) -> Result:
    n, spots = len(image.tokens), places(image)
    groups: list[list[int]] = []
    seen, waiting = 0, []
    for members, height, width in grids(image).values():
        seen += len(members)
        share = k * seen // n - len(groups)
        if not share:  # a tile without a cell of its own goes to the next one
            waiting += members
            continue
        lines = max(1, -(-share // width), min(height, share, round(math.sqrt(share * height / width))))
        own = []
        for line in range(lines):
            count = share * (line + 1) // lines - share * line // lines
            for column in range(count):
                ys = range(line * height // lines, (line + 1) * height // lines)
                xs = range(column * width // count, (column + 1) * width // count)
                own.append([members[y * width + x] for y in ys for x in xs])
        own[0] = waiting + own[0]
        groups, waiting = groups + own, []
    groups[-1] += waiting
    slots = [middle(group, spots) for group in groups]
    order = sorted(range(k), key=lambda row: slots[row])
    labels = [next(row for row, g in enumerate(order) if i in groups[g]) for i in range(n)]
    rows: Array = np.array([image.tokens[groups[g]].mean(0) for g in order])
    return Result(rows, [slots[g] for g in order], labels, merged=[len(groups[g]) > 1 for g in order])


def middle(group: list[int], spots: list[Place]) -> int:
    """The member nearest to the mean place, in the tile with most of them."""
    tiles = sorted({spots[i][0] for i in group})
    tile = max(tiles, key=lambda t: (sum(spots[i][0] == t for i in group), -t))
    members = sorted(i for i in group if spots[i][0] == tile)
    y, x = (sum(spots[i][axis] for i in members) / len(members) for axis in (1, 2))
    far = {i: (spots[i][1] - y) ** 2 + (spots[i][2] - x) ** 2 for i in members}
    return next(i for i in members if far[i] <= min(far.values()) + 1e-9)
