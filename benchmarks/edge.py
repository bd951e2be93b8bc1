"""What does a pruned vision encoder cost outside of Python, and what does int8 do to it?

Times, for the vision part of LLaVA-1.5 (CLIP ViT-L at 336 pixels, projector to 4096, random weights) and of the
embedded mini-llava, one image at a time: the tower with its projector, the same with scoring and ClustRS, and the
selection alone; as ONNX graphs in onnxruntime, eagerly in PyTorch, and with torch.compile. All take turns in one run,
so that their ratios can be trusted where their times cannot.

Then the tower of mini-llava is quantised to int8 (onnxruntime's dynamic quantisation of weights), and compared with the
float32 graph on drawn scenes, clean and noisy: which tokens are kept, and how many questions are answered right.

Writes edge.json, edge.md and edge.png to the output folder.
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
from PIL import Image
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from clustrs import ClustRS, NoPruning, palette
from clustrs.evaluation.tasks.scenes import said
from clustrs.export import PrunedVision, export_onnx, export_selection
from clustrs.images.corruptions import Corruption
from clustrs.images.scenes import examples
from clustrs.models.load import load_model, quiet_transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.edge_onnx import answers, encode, open_graph

TOWER, SELECTION = "tower", "selection"
MODELS = ("clip-large", "mini-llava")
RUNTIMES = ("onnxruntime", "eager", "compile")
CONDITIONS = ("clean", "gaussian:0.5")
KEEP = 16
Row = dict[str, Any]
Call = Callable[[], object]


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
    model: Any, keeps: list[int], folder: Path, threads: int, compiled: bool
) -> tuple[dict[tuple[str, str], Call], Row]:
    """What is timed: (runtime, part) to a call without arguments. Also N and D of the model."""
    calls: dict[tuple[str, str], Call] = {}
    info = export_onnx(model, NoPruning(), folder / "tower.onnx")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, *info.inputs["pixel_values"][1:], generator=generator)  # type: ignore[call-overload]
    tokens = torch.randn(1, info.tokens, info.dim, generator=generator)
    attention = torch.rand(1, info.tokens, generator=generator)
    calls["onnxruntime", TOWER] = graph_call(folder / "tower.onnx", threads, pixel_values=pixels)
    calls["eager", TOWER] = partial(model.model.get_image_features, pixel_values=pixels, return_dict=True)
    if compiled:
        calls["compile", TOWER] = partial(torch.compile(model.model.get_image_features), pixel_values=pixels)
    for keep in keeps:
        method = ClustRS(keep=keep)
        both, alone = f"{TOWER} + {SELECTION}, k = {keep}", f"{SELECTION}, k = {keep}"
        export_onnx(model, method, folder / f"vision-{keep}.onnx")
        export_selection(method, folder / f"select-{keep}.onnx", tokens=info.tokens, dim=info.dim)
        calls["onnxruntime", both] = graph_call(folder / f"vision-{keep}.onnx", threads, pixel_values=pixels)
        selection = graph_call(folder / f"select-{keep}.onnx", threads, tokens=tokens, attention=attention)
        calls["onnxruntime", alone] = selection
        calls["eager", both] = partial(PrunedVision(model, method), pixels)
        calls["eager", alone] = partial(method.select, tokens, attention)
        if compiled:
            calls["compile", alone] = partial(torch.compile(method.select), tokens, attention)
    return calls, {"tokens": info.tokens, "dim": info.dim}


def graph_call(path: Path, threads: int, **inputs: Tensor) -> Call:
    session = open_graph(path, threads)
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


def quantise(folder: Path, model: Any) -> tuple[Path, Path]:
    """The float32 graph of a model, and the same with int8 weights wherever a product has constant weights."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exact, rough = folder / "float32.onnx", folder / "int8.onnx"
    export_onnx(model, ClustRS(keep=KEEP), exact)
    quantize_dynamic(exact, rough, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    return exact, rough


def compare_int8(folder: Path, count: int, threads: int, bar: "tqdm[Any]") -> list[Row]:
    """Kept tokens and answers of the two graphs, on scenes and their noisy copies."""
    model, processor = load_model("mini-llava")
    paths = quantise(folder, model)
    graphs = [open_graph(path, threads) for path in paths]
    rows = []
    for condition in CONDITIONS:
        common, identical, right = [], 0, [0, 0]
        questions = agree = 0
        for example in examples(count):
            image = Image.fromarray(example.drawing.pixels)
            if condition != "clean":
                image = Corruption.parse(condition).apply(image, f"scene-{example.number:04}")
            encoded = [encode(graph, processor, [image]) for graph in graphs]
            kept = [set(indices[0].tolist()) for _, indices in encoded]
            common.append(len(kept[0] & kept[1]) / KEEP)
            identical += kept[0] == kept[1]
            asked = [question.text for question in example.questions]
            said_by = [
                [said(text) for text in answers(model, processor, features.repeat(len(asked), 0), asked, 4)]
                for features, _ in encoded
            ]
            for i, question in enumerate(example.questions):
                questions += 1
                agree += said_by[0][i] == said_by[1][i]
                for which in (0, 1):
                    right[which] += said_by[which][i] == said(question.answer)
            bar.update()
        rows.append(
            {
                "condition": condition,
                "images": count,
                "questions": questions,
                "tokens_in_common": statistics.mean(common),
                "images_with_identical_indices": identical,
                "float32_accuracy": right[0] / questions,
                "int8_accuracy": right[1] / questions,
                "same_answer": agree / questions,
                "float32_bytes": paths[0].stat().st_size,
                "int8_bytes": paths[1].stat().st_size,
            }
        )
    return rows


def timing_table(rows: list[Row]) -> str:
    head = "| model | part | " + " | ".join(f"{runtime} ms" for runtime in RUNTIMES)
    lines = [head + " | onnxruntime / eager | share of the tower, onnxruntime |", "|:--|:--|" + "--:|" * 5]
    for model, part in dict.fromkeys((row["model"], row["part"]) for row in rows):
        cells = {row["runtime"]: row for row in rows if (row["model"], row["part"]) == (model, part)}
        times = " | ".join(f"{cells[r]['ms']:.1f}" if r in cells else "" for r in RUNTIMES)
        graph = cells["onnxruntime"]
        lines.append(f"| {model} | {part} | {times} | {graph['to_eager']:.2f} | {graph['of_tower']:.1%} |")
    return "\n".join(lines)


def int8_table(rows: list[Row]) -> str:
    head = "| images | questions | tokens in common | identical | float32 right | int8 right | same answer |"
    lines = [head.replace("| images", "| | images", 1), "|:--|" + "--:|" * 7]
    for row in rows:
        shares = (row[name] for name in ("float32_accuracy", "int8_accuracy", "same_answer"))
        lines.append(
            f"| {row['condition']} | {row['images']} | {row['questions']} | {row['tokens_in_common']:.1%} | "
            f"{row['images_with_identical_indices']} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
        )
    size = rows[0]["int8_bytes"] / rows[0]["float32_bytes"]
    return "\n".join([*lines, "", f"The int8 file has {size:.0%} of the bytes of the float32 one."])


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = dict(zip(RUNTIMES, map(palette.color, ("clustrs", "random", "grid")), strict=True))
    fig, axes = plt.subplots(1, len(models), figsize=(6.4 * len(models), 4.2), squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models, strict=True):
        parts = list(dict.fromkeys(row["part"] for row in rows if row["model"] == model))
        for offset, runtime in enumerate(RUNTIMES):
            cells = [r for r in rows if r["model"] == model and r["runtime"] == runtime]
            places = [parts.index(r["part"]) + (offset - 1) * 0.27 for r in cells]
            axis.barh(places, [r["ms"] for r in cells], height=0.25, color=colours[runtime], label=runtime)
        axis.set_yticks(range(len(parts)), parts)
        axis.invert_yaxis()
        axis.set(title=model, xlabel="milliseconds per image", xscale="log")
        axis.grid(axis="x", alpha=0.3)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--layers", type=int, default=24, help="of the large tower (default: 24, as published)")
    parser.add_argument("--keep", type=int, nargs="+", default=[16, 144], help="budgets; those above N are left out")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and onnxruntime (default: 2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for the rounds of one model, about")
    parser.add_argument("--images", type=int, default=50, help="scenes for the int8 graph, 6 questions each; 0: none")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    options = parser.parse_args()

    quiet_transformers()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    int8: list[Row] = []
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        tempfile.TemporaryDirectory() as scratch,
        tqdm(disable=None) as bar,
    ):
        for name in options.models:
            folder = Path(scratch) / name
            model = clip_large(options.layers) if name == "clip-large" else load_model(name)[0]
            n = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
            keeps = [keep for keep in options.keep if keep < n]
            calls, sizes = calls_of(model, keeps, folder, options.threads, not options.no_compile)
            rows += [row | sizes for row in measure(name, calls, options.seconds, bar)]
        if options.images:
            int8 = compare_int8(Path(scratch) / "int8", options.images, options.threads, bar)

    options.out.mkdir(parents=True, exist_ok=True)
    machine: Row = {"machine": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()}
    machine |= {"threads": options.threads, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    machine |= {"numpy": np.__version__, "layers of clip-large": options.layers}
    written = {"machine": machine, "rows": rows, "int8": int8}
    (options.out / "edge.json").write_text(json.dumps(written, indent=1) + "\n")
    text = "\n\n".join([", ".join(f"{k} {v}" for k, v in machine.items()), timing_table(rows)])
    text += f"\n\n{int8_table(int8)}" if int8 else ""
    (options.out / "edge.md").write_text(text + "\n")
    plot(rows, options.out / "edge.png")
    print(text)
    print(f"\nwritten: {options.out}/edge.json, edge.md, edge.png")


if __name__ == "__main__":
    main()
