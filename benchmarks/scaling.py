"""Time and memory of a selection against the number of tokens: `selection.py --scaling`.

Processor time of one thread, so that other work on the machine counts little, and the most memory in use beyond the
inputs, as the kernel (Linux) counts it. The yardstick is the product of all tokens with all, alone. A method is not
measured on more tokens once it took longer than `--seconds`.
"""

import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from clustrs import Pruner, get_method, list_methods, palette
from clustrs.pruners.inputs import FURTHER

SIZES = (576, 1152, 2880, 6272, 12544, 24576, 49152)
WIDTH, HIDDEN, KEYS, WORDS, CLUMPS = 3584, 1152, 72, 12, 200
PRODUCT, ALL = "all products", "clustrs, all distances"
Row = dict[str, Any]


def inputs(n: int) -> dict[str, Any]:
    """Tokens in clumps, as frames of a video have them, and all that the methods read."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    clump = torch.randint(CLUMPS, (n,), generator=generator)

    def clumped(width: int) -> Tensor:
        return draw(CLUMPS, width)[clump].add_(draw(n, width))

    projector = draw(HIDDEN, WIDTH)
    states: dict[str, Any] = {"tokens": clumped(WIDTH), "hidden": clumped(HIDDEN), "keys": clumped(KEYS)}
    states |= {name: torch.rand(n, generator=generator).pow_(3) / n for name in ("scores", *FURTHER)}
    states |= {"joint_keys": states["hidden"], "question": draw(WORDS, WIDTH), "cls": False}
    return states | {"projector": lambda hidden: hidden @ projector}


def calls(k: int, names: list[str]) -> dict[str, Callable[[dict[str, Any]], object]]:
    """The yardstick, ClustRS as it was for all N, and the methods."""

    def all_distances(states: dict[str, Any]) -> object:
        from clustrs.ops import dispatch

        before = dispatch.MANY, dispatch.LARGEST
        dispatch.MANY = dispatch.LARGEST = 10**9
        try:
            return get_method("clustrs", keep=k).select(**states)
        finally:
            dispatch.MANY, dispatch.LARGEST = before

    found: dict[str, Callable[[dict[str, Any]], object]] = {
        PRODUCT: lambda states: states["tokens"] @ states["tokens"].T
    }
    found[ALL] = all_distances
    for name in names:
        found[name] = partial(_select, get_method(name, keep=k))
    return found


def _select(method: Pruner, states: dict[str, Any]) -> object:
    return method.select(**states)


def cost(call: Callable[[dict[str, Any]], object], states: dict[str, Any]) -> tuple[float, float]:
    """Seconds of one thread, and the most bytes beyond those in use before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the most memory that was ever in use
    used, start = _status("VmRSS"), time.process_time()
    call(states)
    return time.process_time() - start, _status("VmHWM") - used


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) * 1024


def measure(keeps: list[int], names: list[str], sizes: tuple[int, ...], seconds: float) -> list[Row]:
    """The best time of up to three, and the memory of the first, for every size, budget and method."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    slow: set[tuple[str, int]] = set()
    with torch.inference_mode(), tqdm(total=len(sizes) * len(keeps), desc="scaling", unit="cell", disable=None) as bar:
        for n in sizes:
            states = inputs(n)
            for k in keeps:
                for name, call in calls(k, names).items():
                    if (name, k) in slow:
                        continue
                    taken, memory = cost(call, states)
                    while taken < 1 and (again := cost(call, states)[0]) < taken * 0.97:
                        taken = again
                    rows.append({"n": n, "keep": k, "method": name, "ms": taken * 1e3, "mb": memory / 1e6})
                    if taken > seconds:
                        slow.add((name, k))
                bar.update()
    return rows


def table(rows: list[Row]) -> str:
    """A line for each budget and method, a column for each N: milliseconds and megabytes."""
    sizes = sorted({row["n"] for row in rows})
    lines = ["| k | method |" + "".join(f" N = {n:,} |" for n in sizes), "|--:|:--|" + "--:|" * len(sizes)]
    for k, name in dict.fromkeys((row["keep"], row["method"]) for row in rows):
        found = {
            row["n"]: f"{row['ms']:,.0f} ms, {row['mb']:,.0f} MB"
            for row in rows
            if (row["keep"], row["method"]) == (k, name)
        }
        lines.append(f"| {k} | {name} |" + "".join(f" {found.get(n, '')} |" for n in sizes))
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Time and memory against N, for the smallest budget."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    special = {PRODUCT: ("black", ":", ""), ALL: ("#777777", "--", "")}
    k = min(row["keep"] for row in rows)
    for axis, value, label in zip(
        axes, ("ms", "mb"), ("milliseconds of one thread", "MB beyond the inputs"), strict=True
    ):
        for name in dict.fromkeys(row["method"] for row in rows):
            points = sorted((r["n"], max(r[value], 0.1)) for r in rows if r["method"] == name and r["keep"] == k)
            color, line, marker = special.get(name, (palette.color(name), "-", palette.marker(name)))
            axis.plot(*zip(*points, strict=True), color=color, linestyle=line, marker=marker, label=name)
        ticks = sorted({row["n"] for row in rows})
        axis.set(xscale="log", yscale="log", xlabel=f"tokens, N (k = {k})", ylabel=label)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    fig.savefig(path, dpi=110)


def run(
    out: Path, keeps: list[int], seconds: float, sizes: tuple[int, ...] = SIZES, names: list[str] | None = None
) -> str:
    """Measure, write scaling.json, scaling.md and scaling.png to a folder, and return the table."""
    names = names or [name for name in list_methods("encoder") if name not in ("none", "denoise")]
    rows = measure(keeps, names, sizes, seconds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "scaling.md").write_text(table(rows) + "\n")
    plot(rows, out / "scaling.png")
    return table(rows)
