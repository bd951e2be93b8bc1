"""Does a graph in onnxruntime keep what PyTorch keeps?

Exports the vision part of embedded models with ClustRS, in float32 and in float16, and runs both in onnxruntime over
the images of each model's task, clean and corrupted. Against float32 in PyTorch it counts the images with the same kept
tokens, and how far the tokens of these are apart.

An image of which the float32 graph keeps other tokens, or tokens that are more than a thousandth of their length apart,
is looked at again: does PyTorch's selection in float64, from the same tokens, agree with the graph?

Writes edge-identity.json and edge-identity.md to the output folder.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from tqdm import tqdm

from clustrs import ClustRS
from clustrs.corruptions import Corruption
from clustrs.embedded import default_task
from clustrs.evaluation.tasks import get_task
from clustrs.export import PrunedVision, export_onnx
from clustrs.models.load import load_model, quiet_transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.edge import Encode, Encoded, Row, encode_eagerly
from examples.edge_onnx import encode, open_graph

CORRUPTIONS = {"photo-llava": ("gaussian:0.24", "salt_pepper:0.07"), "mini-llava": ("gaussian:0.2",)}
"""By model: each image is seen clean and with one of these, in turns."""
PRECISIONS = ("float32", "float16")
KEEP = 16
CLOSE, FAR = 1e-4, 1e-3


def pictures(model: str, count: int) -> Iterator[tuple[str, str, Image.Image]]:
    """Condition, name and image: the first images of the model's task, each clean and corrupted."""
    task = get_task(default_task(model))
    names = dict.fromkeys(item.image for item in task.items)
    for number, name in enumerate(islice(names, count)):
        image = task.open(name)
        corruption = CORRUPTIONS[model][number % len(CORRUPTIONS[model])]
        yield "clean", name, image
        yield corruption, name, Corruption.parse(corruption).apply(image, name)


def compare(found: Encoded, expected: Encoded) -> Row:
    """Count the kept tokens of one image that differ; if none does, return the largest difference of a number, and of a
    token as a share of its length."""
    (features,), (indices,) = found
    (reference,), (reference_indices,) = expected
    differ = len(indices) - len(np.intersect1d(indices, reference_indices))
    if differ:
        return {"differ": differ, "absolute": None, "relative": None}
    error = features.astype(np.float64) - reference
    shares = np.linalg.norm(error, axis=-1) / np.linalg.norm(reference.astype(np.float64), axis=-1)
    return {"differ": 0, "absolute": float(abs(error).max()), "relative": float(shares.max())}


def tally(images: list[Row]) -> Row:
    """The counts over some images."""
    same = [row for row in images if not row["differ"]]
    return {
        "images": len(images),
        "images_with_identical_indices": len(same),
        "tokens": KEEP * len(images),
        "tokens_that_differ": sum(row["differ"] for row in images),
        "images_within_1e-4": sum(row["relative"] <= CLOSE for row in same),
        "largest_difference": max((row["absolute"] for row in same), default=None),
        "largest_share_of_length": max((row["relative"] for row in same), default=None),
    }


def look_again(vision: PrunedVision, processor: Any, image: Image.Image, found: Encoded) -> Row:
    """Select from the same tokens in float64: is that what the graph kept, and how many of all tokens are in another
    cluster than in float32?"""
    crops = vision.encode(processor.image_processor([image], return_tensors="pt")["pixel_values"])
    assert crops.scores is not None
    rough = vision.method.select(crops.tokens, crops.scores, cls=crops.cls)
    exact = vision.method.select(crops.tokens.double(), crops.scores.double(), cls=crops.cls)
    assert rough.labels is not None
    assert exact.labels is not None
    beside = compare(found, (exact.tokens.numpy(), exact.indices.numpy()))
    return {
        "tokens_that_differ_from_float64": beside["differ"],
        "share_of_length_from_float64": beside["relative"],
        "tokens_in_another_cluster_in_float64": int((rough.labels != exact.labels).sum()),
    }


def encoders(name: str, folder: Path, processor: Any, threads: int) -> dict[str, Encode]:
    """From images to features and indices in onnxruntime, by precision."""
    ways: dict[str, Encode] = {}
    for precision in PRECISIONS:
        path = folder / f"{name}-{precision}.onnx"
        export_onnx(load_model(name)[0].to(getattr(torch, precision)), ClustRS(keep=KEEP), path)
        ways[precision] = partial(encode, open_graph(path, threads, spinning=False), processor)
    return ways


def measure(name: str, options: argparse.Namespace, folder: Path, bar: "tqdm[Any]") -> tuple[list[Row], list[Row]]:
    """The counts by condition and precision, and the images on which the float32 graph is far from PyTorch."""
    model, processor = load_model(name)
    ways = encoders(name, folder, processor, options.threads)
    vision = PrunedVision(model, ClustRS(keep=KEEP))
    seen: dict[tuple[str, str], list[Row]] = {}
    others: list[Row] = []
    for number, (condition, image_name, image) in enumerate(pictures(name, options.images)):
        expected = encode_eagerly(vision, processor, [image])
        for precision, way in ways.items():
            if precision == "float16" and number >= 2 * options.half_images:
                continue
            found = way([image])
            row = compare(found, expected)
            seen.setdefault((condition, precision), []).append(row)
            if precision == "float32" and (row["differ"] or row["relative"] > FAR):
                about = {"model": name, "condition": condition, "image": image_name}
                apart = {"tokens_that_differ": row["differ"], "share_of_length": row["relative"]}
                others.append(about | apart | look_again(vision, processor, image, found))
        bar.set_postfix_str(f"{name}: {len(others)} differ")
        bar.update()
    counts = [{"model": name, "condition": c, "precision": p} | tally(images) for (c, p), images in seen.items()]
    return sorted(counts, key=lambda row: PRECISIONS.index(row["precision"])), others


def identity_table(rows: list[Row]) -> str:
    head = "| model | images | graph | the same tokens kept | tokens that differ | largest difference | of its length |"
    lines = [head + " images within 1e-4 |", "|:--|:--|:--|" + "--:|" * 5]
    for row in rows:
        same = row["images_with_identical_indices"]
        difference, share = (
            "" if row[key] is None else f"{row[key]:.1e}" for key in ("largest_difference", "largest_share_of_length")
        )
        lines.append(
            f"| {row['model']} | {row['condition']} | {row['precision']} | {same} of {row['images']} | "
            f"{row['tokens_that_differ']} of {row['tokens']} | {difference} | {share} | "
            f"{row['images_within_1e-4']} of {same} |"
        )
    return "\n".join(lines)


def write(options: argparse.Namespace, rows: list[Row], others: list[Row]) -> None:
    """Write edge-identity.json and edge-identity.md."""
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()}
    machine |= {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    written = {"machine": machine, "keep": KEEP, "rows": rows, "images_that_differ": others}
    (options.out / "edge-identity.json").write_text(json.dumps(written, indent=1) + "\n")
    (options.out / "edge-identity.md").write_text(identity_table(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CORRUPTIONS, default=list(CORRUPTIONS), help="(default: all)")
    parser.add_argument("--images", type=int, default=150, help="of each task, clean and corrupted (default: 150)")
    parser.add_argument("--half-images", type=int, default=50, help="of these also in float16 (default: 50)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and onnxruntime (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    options = parser.parse_args()

    quiet_transformers()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    others: list[Row] = []
    total = 2 * options.images * len(options.models)
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch, tqdm(total=total, disable=None) as bar:
        for name in options.models:
            counts, differing = measure(name, options, Path(scratch), bar)
            rows, others = rows + counts, others + differing
            write(options, rows, others)
    print(identity_table(rows))
    print(f"\nwritten: {', '.join(str(path) for path in sorted(options.out.glob('edge-identity.*')))}")


if __name__ == "__main__":
    main()
