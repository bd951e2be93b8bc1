"""Time the selection of tokens.

For every size, budget and batch, each method is timed in turn with two yardsticks: the floor, one N x N x D matrix
product, and the greedy loop of DivPrune as its authors published it, whose cost grows with the number of tokens chosen.
Machines are noisy, so look at the ratios: all the times behind them were taken in the same run, in turns. Every
repetition gets a fresh copy of the tokens, as a model would hand them over, and the allocator starts out as a model
leaves it: after a large block was freed, it no longer returns smaller ones to the system at once.

What a selection costs on an accelerator is mostly the number of launches, so these are counted, too, by torch's
profiler: kernels and CUDA graphs on CUDA, top-level operations on a CPU. On an accelerator ClustRS is measured with its
fused kernels, without them ("clustrs, plain") and compiled ("clustrs, compiled").

`--scaling` measures time and memory against N instead, from 576 to 49,152 tokens (`scaling.py`).

`--published` prints instead how long ours take against the published rules in plain torch (`published.py`).

Writes selection.json, selection.md and selection.png to the output folder.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from clustrs import Pruner, get_method, list_methods, palette
from clustrs.ops import dispatch
from clustrs.pruners.inputs import FURTHER
from clustrs.pruners.registry import display_label

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds only its own folder
from benchmarks import scaling
from benchmarks.published import compare, divprune

HIDDEN, KEYS, WORDS = 1024, 64, 12
LAUNCHES = ("LaunchKernel", "GraphLaunch")
"""Names in the profiler of the launch of a kernel, and of a CUDA graph with all its kernels."""
FLOOR, LOOP = "floor", "divprune's loop"
TARGETS = [("clustrs", 16, FLOOR, 1.4), ("clustrs", 144, FLOOR, 2.0)]
TARGET_SIZE = (576, 4096, 1)
Row = dict[str, Any]


def published_loop(tokens: Tensor, k: int) -> Tensor:
    """DivPrune's published rule, one image after the other."""
    return torch.stack([divprune(image, k) for image in tokens])


def methods(k: int) -> list[Pruner]:
    return [get_method(name, keep=k) for name in list_methods("encoder") if name != "none"]


def accelerator_calls(k: int, attention: Tensor) -> dict[str, Callable[[Tensor], object]]:
    """ClustRS without its fused kernels, and compiled: what they are compared with on an accelerator."""
    method = get_method("clustrs", keep=k)

    def plain(tokens: Tensor) -> object:
        with dispatch.switch("off"):
            return method.select(tokens, attention)

    return {"clustrs, plain": plain, "clustrs, compiled": partial(method.compile().select, scores=attention)}


def count_launches(call: Callable[[Tensor], object], tokens: Tensor) -> int:
    """Kernels and graphs that a call launches; on a CPU its top-level operations."""
    cuda = tokens.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as record:
        call(tokens)
        synchronize(tokens)
    if cuda:
        return sum(any(word in event.name for word in LAUNCHES) for event in record.events())
    top = [event.name for event in record.events() if event.cpu_parent is None]
    return sum(name.startswith(("aten::", "mkldnn::")) for name in top)


def synchronize(tokens: Tensor) -> None:
    if tokens.device.type != "cpu":
        torch.accelerator.synchronize()


def measure(
    n: int, width: int, batch: int, keeps: list[int], seconds: float, bar: "tqdm[Any]", device: str
) -> list[Row]:
    """Median milliseconds of the yardsticks and of every method, in turns, and their launches."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(batch, n, width, generator=generator).to(device)
    attention = torch.rand(batch, n, generator=generator).to(device)
    projector = torch.randn(HIDDEN, width, generator=generator).to(device)
    hidden, keys = (torch.randn(batch, n + 1, size, generator=generator).to(device) for size in (HIDDEN, KEYS))
    states: dict[str, Any] = {"hidden": hidden, "keys": keys, "projector": lambda x: x @ projector}
    states["question"] = torch.randn(batch, WORDS, width, generator=generator).to(device)
    states |= {name: (torch.rand(batch, n, generator=generator) / n).to(device) for name in FURTHER}
    states["joint_keys"] = torch.randn(batch, n, HIDDEN, generator=generator).to(device)
    rows = []
    for k in keeps:
        calls: dict[str, Callable[[Tensor], object]] = {FLOOR: lambda tokens: tokens @ tokens.mT}
        calls[LOOP] = partial(published_loop, k=k)
        for method in methods(k):
            calls[method.name] = partial(method.select, scores=attention, **states)
        calls |= accelerator_calls(k, attention) if device != "cpu" else {}
        times: dict[str, list[float]] = {name: [] for name in calls}
        start = time.perf_counter()
        while len(times[FLOOR]) < 4 or (len(times[FLOOR]) < 41 and time.perf_counter() - start < seconds):
            for name, call in calls.items():
                tokens = source.clone()
                synchronize(tokens)
                before = time.perf_counter()
                call(tokens)
                synchronize(tokens)
                times[name].append(time.perf_counter() - before)
        medians = {name: statistics.median(taken[1:]) * 1e3 for name, taken in times.items()}
        for name, ms in medians.items():
            row: Row = {"n": n, "d": width, "batch": batch, "keep": k, "method": name, "ms": ms}
            row["launches"] = count_launches(calls[name], source)
            row |= {"to_floor": ms / medians[FLOOR], "to_loop": ms / medians[LOOP], "repeats": len(times[name]) - 1}
            rows.append(row)
        bar.update()
    return rows


def measure_naive(n: int, width: int, keeps: list[int], bar: "tqdm[Any]") -> dict[tuple[str, int], float]:
    """Milliseconds of the loop-by-loop references of the tests, once each."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import reference

    rng = np.random.default_rng(0)
    hidden, keys = rng.normal(size=(n + 1, HIDDEN)), rng.normal(size=(n + 1, KEYS))
    image = reference.Image(
        rng.normal(size=(n, width)), rng.random(n), hidden, keys, rng.normal(size=(HIDDEN, width)), cls=True
    )
    more: dict[str, Any] = {name: rng.random(n) / n for name in FURTHER} | {"joint_keys": rng.normal(size=(n, HIDDEN))}
    image = replace(image, question=rng.normal(size=(WORDS, width)), **more)
    times = {}
    for k in keeps:
        for method in methods(k):
            before = time.perf_counter()
            reference.run(method, image)
            times[method.name, k] = (time.perf_counter() - before) * 1e3
        bar.update()
    return times


def table(rows: list[Row]) -> str:
    head = "| N | D | B | k | method | ms | x floor | x DivPrune's loop | launches | reference ms |"
    lines = [head, "|--:|--:|--:|--:|:--|--:|--:|--:|--:|--:|"]
    for row in rows:
        naive = f"{row['naive_ms']:.0f}" if "naive_ms" in row else ""
        numbers = f"{row['ms']:.2f} | {row['to_floor']:.2f} | {row['to_loop']:.2f} | {row['launches']} | {naive}"
        lines.append(f"| {row['n']} | {row['d']} | {row['batch']} | {row['keep']} | {row['method']} | {numbers} |")
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[str]:
    """Compare the results with the targets."""
    lines = []
    for name, k, _, limit in TARGETS:
        for row in rows:
            if row["method"] == name and row["keep"] == k and (row["n"], row["d"], row["batch"]) == TARGET_SIZE:
                verdict = "reached" if row["to_floor"] <= limit else "MISSED"
                lines.append(f"{name} at k = {k}: {row['to_floor']:.2f} x the floor, at most {limit}: {verdict}")
    ours = [row for row in rows if row["method"] == "clustrs"]
    slower = [row for row in ours if row["to_loop"] > 1]
    lines.append(f"clustrs slower than DivPrune's published loop in {len(slower)} of {len(ours)} cells")
    lines += [f"  N = {r['n']}, B = {r['batch']}, k = {r['keep']}: {r['to_loop']:.2f} x" for r in slower]
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """Milliseconds against k and against N, wide enough to be read in a page's column."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    alone = [row for row in rows if row["batch"] == min(r["batch"] for r in rows)]
    names = list(dict.fromkeys(row["method"] for row in alone))
    keeps = sorted({row["keep"] for row in alone})
    panels = [("n", n, "keep", f"N = {n}", "tokens kept, k") for n in sorted({row["n"] for row in alone})]
    panels += [("keep", k, "n", f"k = {k}", "tokens, N") for k in (keeps[0], keeps[-1])]
    lines = -(-len(panels) // 3)
    fig, axes = plt.subplots(lines, 3, figsize=(9.6, 3.4 * lines + 0.9), sharey=True, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, alone, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis in np.atleast_2d(axes)[:, 0]:
        axis.set_ylabel("milliseconds per image")
    shown = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    ordered = [name for name in names if name in shown]
    fig.legend(
        [shown[name] for name in ordered],
        [display_label(name) for name in ordered],
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    fig.savefig(path, dpi=110)


def draw_panel(axis: Any, rows: list[Row], panel: tuple[str, int, str, str, str]) -> None:
    """One line per method where something is fixed, along the other axis."""
    fixed, value, along, title, label = panel
    subset = [row for row in rows if row[fixed] == value]
    special = {FLOOR: ("black", ":", ""), LOOP: ("#777777", "--", "")}
    for name in dict.fromkeys(row["method"] for row in subset):
        points = sorted((row[along], row["ms"]) for row in subset if row["method"] == name)
        if len(points) < 2:  # a lone marker says less than the panel where there are several
            continue
        color, line, marker = special.get(name, (palette.color(name), "-", palette.marker(name)))
        axis.plot(*zip(*points, strict=True), color=color, linestyle=line, marker=marker, label=name)
    ticks = sorted({row[along] for row in subset})
    scale = {"xscale": "log"} if along == "n" else {}
    axis.set(title=title, xlabel=label, yscale="log", **scale)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def sizes(text: str) -> tuple[int, int]:
    n, width = text.lower().split("x")
    return int(n), int(width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_sizes = [(576, 4096), (729, 3584), (2880, 4096)]
    parser.add_argument(
        "--sizes", type=sizes, nargs="+", default=default_sizes, metavar="NxD", help="for example 576x4096"
    )
    parser.add_argument("--keep", type=int, nargs="+", default=[16, 50, 144, 180], help="budgets")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="images at once")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for one size, batch and budget, about")
    parser.add_argument("--naive-up-to", type=int, default=729, help="time the slow references up to this N")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument("--published", action="store_true", help="only our time over that of the published rules")
    parser.add_argument("--scaling", action="store_true", help="time and memory against N")
    options = parser.parse_args()
    if options.scaling:
        print(scaling.run(options.out, options.keep, options.seconds))
        return
    if options.published:
        with torch.inference_mode():
            print(compare(options.keep))
        return

    torch.set_num_threads(options.threads)
    torch.zeros(31 * 2**18)  # 31 MiB, freed at once: see above
    small = [size for size in options.sizes if size[0] <= options.naive_up_to]
    steps = len(options.keep) * (len(options.sizes) * len(options.batch) + len(small))
    rows: list[Row] = []
    with torch.inference_mode(), tqdm(total=steps, desc="selection", unit="cell", disable=None) as bar:
        for n, width in options.sizes:
            for batch in options.batch:
                rows += measure(n, width, batch, options.keep, options.seconds, bar, options.device)
        for n, width in small:
            naive = measure_naive(n, width, options.keep, bar)
            for row in rows:
                if (row["n"], row["d"], row["batch"]) == (n, width, 1) and (row["method"], row["keep"]) in naive:
                    row["naive_ms"] = naive[row["method"], row["keep"]]

    options.out.mkdir(parents=True, exist_ok=True)
    cpu = torch.backends.cpu.get_cpu_capability()
    machine = {
        "machine": platform.machine(),
        "device": options.device,
        "kernels": cpu,
        "threads": options.threads,
        "torch": torch.__version__,
    }
    (options.out / "selection.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    text = "\n".join([", ".join(f"{k} {v}" for k, v in machine.items()), "", table(rows), "", *verdicts(rows)])
    (options.out / "selection.md").write_text(text + "\n")
    plot(rows, options.out / "selection.png")
    print(text)
    print(f"\nwritten: {options.out}/selection.json, selection.md, selection.png")


if __name__ == "__main__":
    main()
