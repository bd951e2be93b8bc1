"""Measure the cost of a pruned vision encoder outside of Python, and the effect of lower precision.

Times, for the vision part of LLaVA-1.5 (CLIP ViT-L at 336 pixels, projector to 4096, random weights) and of the
embedded mini-llava, one image at a time: the tower with its projector, the same with scoring and ClustRS, and the
selection alone; as ONNX graphs in onnxruntime, eagerly in PyTorch, and with torch.compile. All take turns in one run,
so that their ratios can be trusted where their times cannot.

Then mini-llava's vision part in less precision, float16 and int8 (onnxruntime's dynamic quantization), is compared with
float32 in PyTorch on drawn scenes, clean and noisy: which tokens are kept, and how many questions are answered right.

Writes edge.json, edge.md and edge.png to the output folder; `--draw edge.json` draws the picture of a stored run again.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from clustrs import ClustRS, NoPruning, palette
from clustrs.corruptions import Corruption
from clustrs.evaluation.tasks import normalize_answer
from clustrs.export import PrunedVision, export_onnx, export_selection
from clustrs.models.load import load_model, quiet_transformers
from clustrs_models.scenes import examples

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.edge_onnx import answers, encode, open_graph

TOWER, SELECTION = "tower", "selection"
MODELS = ("clip-large", "mini-llava")
RUNTIMES = ("onnxruntime", "eager", "compile")
CONDITIONS = ("clean", "gaussian:0.2")
REFERENCE = "PyTorch float32"
KEEP = 16
LONGEST_COMPILED = 16
"""Larger budgets are not compiled: the seeding is unrolled, and with 144 seeds it was not done after five minutes."""
Row = dict[str, Any]
Call = Callable[[], object]
Encoded = tuple[NDArray[Any], NDArray[np.int64]]
Encode = Callable[[list[Image.Image]], Encoded]


def clip_large(layers: int) -> LlavaForConditionalGeneration:
    """LLaVA-1.5's vision part with random weights; its language model is a stub of the right width."""
    tower = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=64, hidden_size=4096, intermediate_size=64, num_hidden_layers=1, num_attention_heads=32
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=3, vision_feature_layer=-2)
    return LlavaForConditionalGeneration(config).eval()


def calls_of(
    model: Any, keeps: list[int], folder: Path, threads: int, *, compiled: bool, combined: bool
) -> tuple[dict[tuple[str, str], Call], Row]:
    """Return the timed calls by (runtime, part), without arguments. Also N and D of the model."""
    calls: dict[tuple[str, str], Call] = {}
    info = export_onnx(model, NoPruning(), folder / "tower.onnx")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, *map(int, info.inputs["pixel_values"][1:]), generator=generator)
    tokens = torch.randn(1, info.tokens, info.dim, generator=generator)
    attention = torch.rand(1, info.tokens, generator=generator)
    calls["onnxruntime", TOWER] = graph_call(folder / "tower.onnx", threads, pixel_values=pixels)
    calls["eager", TOWER] = partial(model.model.get_image_features, pixel_values=pixels, return_dict=True)
    if compiled:
        calls["compile", TOWER] = partial(torch.compile(model.model.get_image_features), pixel_values=pixels)
    for keep in keeps:
        method = ClustRS(keep=keep)
        both, alone = f"{TOWER} + {SELECTION}, k = {keep}", f"{SELECTION}, k = {keep}"
        export_selection(method, folder / f"select-{keep}.onnx", tokens=info.tokens, dim=info.dim)
        selection = graph_call(folder / f"select-{keep}.onnx", threads, tokens=tokens, attention=attention)
        calls["onnxruntime", alone] = selection
        calls["eager", alone] = partial(method.select, tokens, attention)
        if compiled and keep <= LONGEST_COMPILED:
            calls["compile", alone] = partial(torch.compile(method.select), tokens, attention)
        if combined:
            export_onnx(model, method, folder / f"vision-{keep}.onnx")
            calls["onnxruntime", both] = graph_call(folder / f"vision-{keep}.onnx", threads, pixel_values=pixels)
            calls["eager", both] = partial(PrunedVision(model, method), pixels)
    return calls, {"tokens": info.tokens, "dim": info.dim}


def graph_call(path: Path, threads: int, **inputs: Tensor) -> Call:
    """A call of a graph. onnxruntime's threads may not spin after it: they would take the cores from the next call."""
    session = open_graph(path, threads, spinning=False)
    return partial(session.run, None, {name: value.numpy() for name, value in inputs.items()})


def measure(name: str, calls: dict[tuple[str, str], Call], seconds: float, bar: "tqdm[Any]") -> list[Row]:
    """Median milliseconds of every call, in turns; the first round, which compiles, is not counted."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for key, call in calls.items():
        bar.set_postfix_str(f"{name}: {' '.join(key)}")
        call()
        bar.update()
    start = time.perf_counter()
    while len(times[next(iter(calls))]) < 3 or time.perf_counter() - start < seconds:
        for key, call in calls.items():
            before = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - before)
    medians = {key: statistics.median(taken) * 1e3 for key, taken in times.items()}
    return [
        {
            "model": name,
            "runtime": runtime,
            "part": part,
            "ms": ms,
            "to_eager": ms / medians["eager", part],
            "of_tower": ms / medians[runtime, TOWER] if (runtime, TOWER) in medians else None,
            "repeats": len(times[runtime, part]),
        }
        for (runtime, part), ms in medians.items()
    ]


def quantize(exact: Path, rough: Path) -> None:
    """Write a graph with int8 weights wherever a product has constant ones: in tower and projector."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(exact, rough, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])


def encoders(folder: Path, model: Any, processor: Any, threads: int) -> tuple[dict[str, Encode], dict[str, int]]:
    """Ways from an image to features and indices, the reference first; and the sizes of the graphs in bytes."""
    method = ClustRS(keep=KEEP)
    half = load_model("mini-llava")[0].half()
    paths = {f"onnxruntime {name}": folder / f"{name}.onnx" for name in ("float32", "float16", "int8")}
    exact, rough, int8 = paths.values()
    export_onnx(model, method, exact)
    export_onnx(half, method, rough)
    quantize(exact, int8)
    ways: dict[str, Encode] = {
        REFERENCE: partial(encode_eagerly, PrunedVision(model, method), processor),
        "PyTorch float16": partial(encode_eagerly, PrunedVision(half, method), processor),
    }
    ways |= {name: partial(encode, open_graph(path, threads), processor) for name, path in paths.items()}
    return ways, {name: path.stat().st_size for name, path in paths.items()}


def encode_eagerly(vision: PrunedVision, processor: Any, images: list[Image.Image]) -> Encoded:
    """Encode without a graph."""
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    features, indices, _ = vision(pixels.to(next(vision.parameters()).dtype))
    return features.numpy(), indices.numpy()


def compare_precisions(folder: Path, count: int, threads: int, bar: "tqdm[Any]") -> list[Row]:
    """Kept tokens and answers of every precision beside the reference, on scenes and their noisy copies."""
    model, processor = load_model("mini-llava")
    ways, sizes = encoders(folder, model, processor, threads)
    rows: list[Row] = []
    for condition in CONDITIONS:
        seen: dict[str, list[Row]] = {name: [] for name in ways}
        for example in examples(count):
            bar.set_postfix_str(f"precisions, {condition}")
            image = Image.fromarray(example.drawing.pixels)
            if condition != "clean":
                image = Corruption.parse(condition).apply(image, f"scene-{example.number:04}")
            asked = [question.text for question in example.questions]
            right = [normalize_answer(question.answer) for question in example.questions]
            for name, way in ways.items():
                features, indices = way([image])
                texts = answers(model, processor, features.repeat(len(asked), 0), asked, 4)
                seen[name].append(
                    {"kept": set(indices[0].tolist()), "said": list(map(normalize_answer, texts)), "right": right}
                )
            bar.update()
        rows += [
            {"condition": condition, "encoder": name, "bytes": sizes.get(name)} | tally(seen[name], seen[REFERENCE])
            for name in ways
        ]
    return rows


def tally(images: list[Row], references: list[Row]) -> Row:
    """Compare the kept tokens and answers of one precision with the reference."""
    common = [len(image["kept"] & other["kept"]) for image, other in zip(images, references, strict=True)]
    said_here, said_there, right = (
        [text for row in rows for text in row[key]]
        for rows, key in ((images, "said"), (references, "said"), (images, "right"))
    )
    return {
        "images": len(images),
        "images_with_identical_indices": sum(n == KEEP for n in common),
        "tokens": KEEP * len(images),
        "tokens_that_differ": KEEP * len(images) - sum(common),
        "questions": len(right),
        "right": sum(a == b for a, b in zip(said_here, right, strict=True)),
        "same_answer": sum(a == b for a, b in zip(said_here, said_there, strict=True)),
    }


def timing_table(rows: list[Row]) -> str:
    head = "| model | part | " + " | ".join(f"{runtime} ms" for runtime in RUNTIMES)
    lines = [head + " | onnxruntime / eager | share of the tower, onnxruntime |", "|:--|:--|" + "--:|" * 5]
    for model, part in dict.fromkeys((row["model"], row["part"]) for row in rows):
        cells = {row["runtime"]: row for row in rows if (row["model"], row["part"]) == (model, part)}
        times = " | ".join(f"{cells[r]['ms']:.1f}" if r in cells else "" for r in RUNTIMES)
        graph = cells["onnxruntime"]
        lines.append(f"| {model} | {part} | {times} | {graph['to_eager']:.2f} | {graph['of_tower']:.1%} |")
    return "\n".join(lines)


def precision_table(rows: list[Row]) -> str:
    head = "| | | images with the same tokens | tokens that differ | right answers | same answers | MB |"
    lines = [head, "|:--|:--|" + "--:|" * 5]
    for row in rows:
        questions = row["questions"]
        size = f"{row['bytes'] / 1e6:.1f}" if row["bytes"] else ""
        lines.append(
            f"| {row['condition']} | {row['encoder']} | {row['images_with_identical_indices']} of {row['images']} | "
            f"{row['tokens_that_differ']} of {row['tokens']} | {row['right']} of {questions} | "
            f"{row['same_answer']} of {questions} | {size} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    colors = dict(zip(RUNTIMES, palette.SERIES, strict=False))
    fig, axes = plt.subplots(1, len(models), figsize=(6.4 * len(models), 4.2), squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models, strict=True):
        parts = list(dict.fromkeys(row["part"] for row in rows if row["model"] == model))
        for offset, runtime in enumerate(RUNTIMES):
            cells = [r for r in rows if r["model"] == model and r["runtime"] == runtime]
            places = [parts.index(r["part"]) + (offset - 1) * 0.27 for r in cells]
            bars = axis.barh(places, [r["ms"] for r in cells], height=0.25, color=colors[runtime], label=runtime)
            axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=7)
        axis.set_yticks(range(len(parts)), parts)
        axis.invert_yaxis()
        axis.set(title=model, xlabel="milliseconds per image")
        axis.margins(x=0.1)
        axis.set_axisbelow(True)
        axis.grid(axis="x", alpha=0.3)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, dpi=110)


def time_models(options: argparse.Namespace, scratch: Path, bar: "tqdm[Any]") -> list[Row]:
    rows: list[Row] = []
    for name in options.models:
        model: Any = clip_large(options.layers) if name == "clip-large" else load_model(name)[0]
        n = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
        keeps = [keep for keep in options.keep if keep < n]
        calls, sizes = calls_of(
            model,
            keeps,
            scratch / name,
            options.threads,
            compiled=not options.no_compile,
            combined=not options.no_combined,
        )
        rows += [row | sizes for row in measure(name, calls, options.seconds, bar)]
    return rows


def write(options: argparse.Namespace, rows: list[Row], precisions: list[Row]) -> None:
    """Write edge.json, edge.md and, where something was timed, edge.png."""
    options.out.mkdir(parents=True, exist_ok=True)
    machine: Row = {"machine": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()}
    machine |= {"threads": options.threads, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    machine |= {"numpy": np.__version__, "layers of clip-large": options.layers}
    written = {"machine": machine, "rows": rows, "precisions": precisions}
    (options.out / "edge.json").write_text(json.dumps(written, indent=1) + "\n")
    tables = [timing_table(rows)] * bool(rows) + [precision_table(precisions)] * bool(precisions)
    text = "\n\n".join([", ".join(f"{k} {v}" for k, v in machine.items()), *tables])
    (options.out / "edge.md").write_text(text + "\n")
    if rows:
        plot(rows, options.out / "edge.png")
    print(text)
    print(f"\nwritten: {', '.join(str(path) for path in sorted(options.out.glob('edge.*')))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="to time (default: both)")
    parser.add_argument("--layers", type=int, default=24, help="of the large tower (default: 24, as published)")
    parser.add_argument("--keep", type=int, nargs="+", default=[16, 144], help="budgets; those above N are left out")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and onnxruntime (default: 2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for the rounds of one model, about")
    parser.add_argument("--images", type=int, default=36, help="scenes for the precisions, 6 questions each; 0: none")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-combined", action="store_true", help="leave tower and selection in one graph out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw edge.png from this file, measure nothing")
    options = parser.parse_args()
    if options.draw is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        plot(json.loads(options.draw.read_text())["rows"], options.out / "edge.png")
        return

    quiet_transformers()
    torch.set_num_threads(options.threads)
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch, tqdm(disable=None) as bar:
        rows = time_models(options, Path(scratch), bar)
        precisions = []
        if options.images:
            precisions = compare_precisions(Path(scratch) / "precisions", options.images, options.threads, bar)
    write(options, rows, precisions)


if __name__ == "__main__":
    main()
