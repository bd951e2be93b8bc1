"""Which tokens does each method keep? A drawn example: two features, eight clumps, noise, and some stray tokens.

Prints a table and draws what every method keeps. Each clump stands for one thing in an image; attention falls mostly
on two of them, as it does in a vision encoder. Nothing here says which method is best for a real model.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clustrs import Selection, get_method, list_methods, method_class
from clustrs.pruners.inputs import FURTHER

CLUMPS, SIDE = 8, 24


def draw_tokens(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [576, 2] around the clumps [8, 2], the clump of each (-1: a stray), and attention [576]."""
    generator = torch.Generator().manual_seed(seed)
    n = SIDE * SIDE
    angle = torch.arange(CLUMPS) * (2 * math.pi / CLUMPS)
    clumps = 10 * torch.stack([angle.cos(), angle.sin()], -1) + torch.tensor([14.0, 14.0])
    sizes = torch.tensor([5.0, 4.0, 4.0, 3.0, 2.0, 1.0, 1.0, 0.6])
    clump = torch.multinomial(sizes, n, replacement=True, generator=generator)
    tokens = clumps[clump] + 1.1 * torch.randn(n, 2, generator=generator)
    stray = torch.rand(n, generator=generator) < 0.04
    tokens[stray] = 28 * torch.rand(int(stray.sum()), 2, generator=generator)
    clump[stray] = -1
    interest = torch.tensor([0.5, 0.4, 3.0, 0.5, 2.0, 0.7, 0.6, 0.8, 0.3])[clump]
    attention = interest * torch.rand(n, generator=generator) ** 2
    return tokens, clumps, clump, attention / attention.sum()


def describe(result: Selection, clumps: Tensor, clump: Tensor, attention: Tensor) -> tuple[int, float, float]:
    """Clumps that have a token, share of the attention that is kept, mean distance of kept tokens to their clump."""
    patches = result.indices >= 0
    indices = result.indices[patches]
    own = clump[indices]
    distance = (result.tokens[patches] - clumps[own]).norm(dim=-1)[own >= 0]
    return len(set(own.tolist()) - {-1}), float(attention[indices].sum()), float(distance.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=16, help="how many of the 576 tokens survive (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn tokens (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out/demo/token_clouds.png"), help="where to draw")
    options = parser.parse_args()

    tokens, clumps, clump, attention = draw_tokens(options.seed)
    hidden = torch.cat([tokens.mean(0, keepdim=True), tokens])
    states: dict[str, Any] = {"hidden": hidden, "keys": hidden, "projector": lambda x: x, "question": clumps[:1]}
    results = {}
    print(f"keeping {options.keep} of {len(tokens)} tokens in {CLUMPS} clumps\n")
    print("| method    | tokens | clumps hit | attention kept | distance to the clump |")
    print("|:----------|-------:|-----------:|---------------:|----------------------:|")
    states |= dict.fromkeys(FURTHER, attention) | {"joint_keys": tokens}
    for name in list_methods("encoder"):
        method = get_method(name) if name == "none" else get_method(name, keep=options.keep)
        result = results[name] = method.select(tokens, attention, **states)
        hit, share, distance = describe(result, clumps, clump, attention)
        print(f"| {name:9} | {len(result.tokens):6} | {hit:10} | {share:14.1%} | {distance:21.2f} |")
    draw(options.out, tokens, attention, results)
    print(f"\ndrawn: {options.out}")


def draw(path: Path, tokens: Tensor, attention: Tensor, results: dict[str, Selection]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pruned = {name: result for name, result in results.items() if name != "none"}
    lines = -(-len(pruned) // 3)
    fig, axes = plt.subplots(lines, 3, figsize=(13, 3.8 * lines), sharex=True, sharey=True, layout="constrained")
    for axis in axes.flat[len(pruned) :]:
        axis.set_axis_off()
    for axis, (name, result) in zip(axes.flat, pruned.items(), strict=False):
        clusters = name == "clustrs" and result.labels is not None
        look = {"c": result.labels, "cmap": "tab20"} if clusters else {"color": "#bbbbbb"}
        axis.scatter(*tokens.T, s=6 + 4000 * attention, alpha=0.45, linewidths=0, **look)
        kept = result.indices >= 0
        before, after = tokens[result.indices[kept]], result.tokens[kept]
        axis.scatter(*before.T, s=26, facecolors="none", edgecolors="black", linewidths=1.1, label="kept token")
        moved = (after - before).norm(dim=-1) > 0
        if moved.any():
            shift = (after - before)[moved]
            axis.quiver(
                *before[moved].T, *shift.T, angles="xy", scale_units="xy", scale=1, width=0.005, color="#d55e00"
            )
            axis.scatter(*after[moved].T, s=22, marker="x", c="#d55e00", label="what the model gets")
        axis.legend(loc="lower left", frameon=False, fontsize=8)
        axis.set_title(f"{method_class(name).label}: {len(result.tokens)} tokens")
        axis.set(xticks=[], yticks=[])
    shown = torch.cat([tokens, *(result.tokens for result in pruned.values())])  # merged tokens may lie far outside
    (left, bottom), (right, top) = shown.amin(0).tolist(), shown.amax(0).tolist()
    axes.flat[0].set(xlim=(left - 1, right + 1), ylim=(bottom - 4, top + 1))
    fig.suptitle("Tokens in two features; a dot's size is its attention, its color (ClustRS only) its cluster")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=75)


if __name__ == "__main__":
    main()
