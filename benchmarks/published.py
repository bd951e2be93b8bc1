"""The rules of other authors written plainly in torch, in the type of their input, for one image: what their authors'
code does, without exact ties, batches or checks. `selection.py` times ours against them on the same tensors."""

import inspect
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, normalize

from clustrs import get_method

Rule = Callable[..., object]


def fastervlm(tokens: Tensor, scores: Tensor, k: int, **_: Any) -> Tensor:
    return tokens[scores.topk(k).indices.sort().values]


def divprune(tokens: Tensor, k: int, **_: Any) -> Tensor:
    """The greedy loop, with an index_select over the growing chosen set."""
    unit = normalize(tokens, dim=-1)
    far = 1 - unit @ unit.T
    chosen = far.topk(2, dim=0, largest=False).values[1].argmax().view(1)
    for _step in range(k - 1):
        closest = far.index_select(0, chosen).min(0).values
        chosen = torch.cat([chosen, closest.index_fill(0, chosen, -1).argmax().view(1)])
    return tokens[chosen.sort().values]


def visionzip(tokens: Tensor, scores: Tensor, k: int, hidden: Tensor, keys: Tensor, projector: Any, **_: Any) -> Tensor:
    contextual = max(1, 10 * k // 64)
    best = scores.topk(k - contextual - 1).indices + 1
    mask = torch.ones(len(hidden), dtype=torch.bool).index_fill_(0, torch.cat([best.new_zeros(1), best]), False)
    rest, metric = hidden[mask], normalize(keys[mask], dim=-1)
    step = len(rest) // contextual
    targets = torch.arange(0, len(rest), step)[:contextual]
    others = torch.ones(len(rest), dtype=torch.bool).index_fill_(0, targets, False)
    goal = (metric[others] @ metric[targets].T).argmax(-1)
    one_hot = torch.zeros(len(goal), contextual).scatter_(1, goal[:, None], 1)
    means = one_hot.T @ rest[others] / one_hot.sum(0).clamp(min=1)[:, None]
    return projector(torch.cat([hidden[:1], hidden[best.sort().values], rest[targets] + means]))


def vispruner(tokens: Tensor, scores: Tensor, k: int, hidden: Tensor, **_: Any) -> Tensor:
    order = scores.argsort(descending=True)
    important, rest, unit = order[: k // 2], order[k // 2 :], normalize(hidden[1:], dim=-1)
    while len(rest) > k - k // 2:
        drop = min(8, len(rest) - (k - k // 2))
        even, odd = rest[::2], rest[1::2]
        alike = (unit[even] @ unit[odd].T).max(-1).values
        rest = torch.cat([even[alike.argsort(descending=True)[drop:]], odd])
    return tokens[torch.cat([important, rest]).sort().values]


def tome(tokens: Tensor, k: int, keys: Tensor, **_: Any) -> Tensor:
    """Bipartite soft matching, in rounds that merge at most half of what is left."""
    metric, sizes = keys[1:], torch.ones(len(tokens), 1)
    while len(tokens) > k:
        r = min(len(tokens) // 2, len(tokens) - k)
        unit = normalize(metric, dim=-1)
        best, target = (unit[::2] @ unit[1::2].T).max(-1)
        order = best.argsort(descending=True)
        source, stay = order[:r], order[r:].sort().values
        goal, parts = target[source], []
        for part in (tokens * sizes, metric * sizes, sizes):
            even, odd = part[::2], part[1::2]
            parts.append(torch.cat([even[stay], odd.index_add(0, goal, even[source])]))
        sizes = parts[2]
        tokens, metric = parts[0] / sizes, parts[1] / sizes
    return tokens


def mmr(tokens: Tensor, scores: Tensor, k: int, **_: Any) -> Tensor:
    unit = normalize(tokens, dim=-1)
    alike = unit @ unit.T
    importance = (scores - scores.min()) / (scores.max() - scores.min() + 1e-6)
    chosen, closest = [int(importance.argmax())], torch.full_like(scores, -torch.inf)
    for _step in range(k - 1):
        closest = torch.maximum(closest, alike[chosen[-1]])
        value = 0.5 * importance - 0.5 * closest
        value[chosen] = -torch.inf
        chosen.append(int(value.argmax()))
    return tokens[torch.tensor(chosen).sort().values]


def cdpruner(tokens: Tensor, k: int, question: Tensor, **_: Any) -> Tensor:
    """Greedy MAP of the determinantal process by an incremental Cholesky factorization of the whole kernel."""
    unit = normalize(tokens, dim=-1)
    relevance = (unit @ normalize(question, dim=-1).T).mean(-1)
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    kernel = relevance[:, None] * (unit @ unit.T) * relevance
    factor, left, chosen = torch.zeros(k, len(tokens)), kernel.diagonal().clone(), []
    for step in range(k):
        best = int(left.argmax())
        chosen.append(best)
        factor[step] = (kernel[best] - factor[:step, best] @ factor[:step]) / left[best].sqrt()
        left = (left - factor[step].square()).index_fill(0, torch.tensor(chosen), -torch.inf)
    return tokens[torch.tensor(chosen).sort().values]


def scope(tokens: Tensor, scores: Tensor, k: int, hidden: Tensor, **_: Any) -> Tensor:
    unit = normalize(hidden[1:], dim=-1)
    alike, covered, chosen = unit @ unit.T, torch.zeros(len(tokens)), []
    left = torch.ones(len(tokens), dtype=torch.bool)
    for _step in range(k):
        gain = (alike - covered[:, None]).clamp(min=0).sum(0) * scores
        best = int(gain.masked_fill(~left, -torch.inf).argmax())
        chosen.append(best)
        left[best] = False
        covered = torch.maximum(covered, alike[best])
    return tokens[torch.tensor(chosen).sort().values]


def holov(tokens: Tensor, scores: Tensor, k: int, **_: Any) -> Tensor:
    runs = tokens.unflatten(0, (16, -1))
    unit = normalize(runs, dim=-1)
    n, attention = runs.shape[1], 1000 * scores.unflatten(0, (16, -1))
    alike = (unit @ unit.mT).masked_fill(torch.eye(n, dtype=torch.bool), 0)
    variance = (alike - alike.sum(-1, keepdim=True) / (n - 1)).square().sum(-1) / (n - 1)
    scaled = variance * attention.abs().mean(-1, keepdim=True) / (variance.abs().mean(-1, keepdim=True) + 1e-6)
    share = (attention + 0.09 * scaled).mean(-1)
    share = share / share.sum()
    budget = (share * k).floor().long()
    budget[share.argsort(descending=True)[: k - int(budget.sum())]] += 1
    kept = [run * n + attention[run].topk(min(int(count), n)).indices for run, count in enumerate(budget)]
    return tokens[torch.cat(kept).sort().values]


def hiprune(tokens: Tensor, k: int, received: Tensor, object_scores: Tensor, **_: Any) -> Tensor:
    side = round(len(tokens) ** 0.5)
    anchors = object_scores.topk(max(1, round(k * 0.02))).indices
    kept = torch.cat([anchors + step for step in (0, 1, -1, side, -side)]).clamp(0, len(tokens) - 1).unique()
    return tokens[torch.cat([kept, received.index_fill(0, kept, -1).topk(k - len(kept)).indices]).sort().values]


def vscan(tokens: Tensor, scores: Tensor, k: int, early_scores: Tensor, **_: Any) -> Tensor:
    side, each = round(len(tokens) ** 0.5), max(1, k // 32)
    grid = torch.arange(len(tokens)).view(4, side // 4, 4, side // 4).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    local = grid.gather(1, early_scores[grid].topk(each).indices).flatten()[: k // 2]
    best = scores.index_fill(0, local, -1).topk(k - len(local)).indices
    kept = torch.cat([local, best]).sort().values
    others = torch.ones(len(tokens), dtype=torch.bool).index_fill_(0, kept, False)
    unit = normalize(tokens, dim=-1)
    goal = (unit[others] @ unit[kept].T).argmax(-1)
    sums = tokens[kept].index_add(0, goal, tokens[others])
    return sums / (1 + goal.bincount(minlength=len(kept)))[:, None]


def prumerge(k: int, hidden: Tensor, joint_scores: Tensor, joint_keys: Tensor, projector: Any, **_: Any) -> Tensor:
    """The loop over kept tokens, as published."""
    n = len(joint_scores)
    attended = joint_scores.topk(k - k // 2).indices
    rest = joint_scores.new_ones(n).index_fill_(0, attended, 0).nonzero()[:, 0]
    kept = torch.cat([attended, rest[:: len(rest) // (k // 2)][: k // 2]]).sort().values
    unit, states, rows = normalize(joint_keys, dim=-1), hidden[1:], []
    for i in kept:
        near = (unit @ unit[i]).index_fill(0, i, -1).topk(32).indices
        rows.append(states[i] + (states[near] * joint_scores[near, None]).sum(0))
    return projector(torch.stack(rows))


def downsample(tokens: Tensor, k: int, **_: Any) -> Tensor:
    side, small = round(len(tokens) ** 0.5), int(k**0.5)
    return adaptive_avg_pool2d(tokens.T.unflatten(1, (side, side)), small).flatten(1).T


def random(tokens: Tensor, k: int, **_: Any) -> Tensor:
    return tokens[torch.randperm(len(tokens))[:k].sort().values]


RULES: dict[str, Rule] = {
    "fastervlm": fastervlm,
    "divprune": divprune,
    "visionzip": visionzip,
    "vispruner": vispruner,
    "tome": tome,
    "mmr": mmr,
    "cdpruner": cdpruner,
    "scope": scope,
    "holov": holov,
    "hiprune": hiprune,
    "vscan": vscan,
    "prumerge-plus": prumerge,
    "downsample": downsample,
    "random": random,
}
"""By our name of the method. They take tokens [N, D], N a square and a multiple of 16, and what the method needs."""


@torch.no_grad()
def compare(keeps: list[int], repeats: int = 9) -> str:
    """Return a table of our time over theirs, N = 576, D = 4096, the least of some repetitions in turns, without
    gradients, as in `generate`.

    Both get the tensors that the rule reads, as a model would record them for the method. Processor time in one thread,
    so that other work on the machine counts as little as possible; ours without the checks of values, which the rules
    do not have.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.zeros(31 * 2**18)  # 31 MiB, freed at once: the allocator as a model leaves it (see selection.py)
    draw = torch.Generator().manual_seed(0)
    n, width = 576, 4096
    source, matrix = torch.randn(n, width, generator=draw), torch.randn(1024, width, generator=draw)
    given: dict[str, Any] = {"scores": torch.rand(n, generator=draw), "projector": lambda states: states @ matrix}
    for name, size in (("hidden", 1024), ("keys", 64)):
        given[name] = torch.randn(n + 1, size, generator=draw)
    for name in ("received", "object_scores", "early_scores", "joint_scores"):
        given[name] = torch.rand(n, generator=draw) / n
    given["joint_keys"], given["question"] = (torch.randn(*size, generator=draw) for size in ((n, 1024), (12, width)))
    lines = ["| method | k | ours ms | published rule ms | ratio |", "|:--|--:|--:|--:|--:|"]
    for name, rule in RULES.items():
        read = {key: given[key] for key in inspect.signature(rule).parameters if key in given}
        for k in keeps:
            method, times = get_method(name, keep=k), (list[float](), list[float]())
            calls: list[Rule] = [partial(method.select, check=False), partial(rule, k=k)]
            while len(times[0]) < repeats or sum(map(sum, times)) < 0.2:
                for own, call in zip(times, calls, strict=True):
                    tokens = source.clone()
                    before = process_time()
                    call(tokens=tokens, **read)
                    own.append(process_time() - before)
            ours, theirs = (1e3 * min(own) for own in times)
            lines.append(f"| {name} | {k} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")
    torch.set_num_threads(threads)
    return "\n".join(lines)
