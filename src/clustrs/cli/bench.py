"""`clustrs bench`: how much faster a pruned model is, stage by stage."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.ask import make_method
from clustrs.cli.base import Command, app
from clustrs.embedded import DEFAULT, folder_of, image_path
from clustrs.validation import CHOICES, LoadOptions

EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs bench --model M --keep 64 144
  clustrs bench --model M --pruning tuned/pruning.json --batch 1 8
  clustrs bench --shape llava-1.5-7b --keep 16 64 144 --layers 4
The last needs no download; times of its 32 layers are extrapolated.
Shapes: llava-1.5-7b llava-1.5-13b llava-onevision-0.5b llava-onevision-7b
qwen2.5-vl-3b qwen2.5-vl-7b qwen3-vl-4b qwen3-vl-8b internvl3-2b gemma-3-4b
smolvlm-256m. Their prompt is the image and 40 tokens of text.
"""
TEXT = "word " * 38  # with USER: and ASSISTANT: 40 tokens
SHAPE = "a published architecture with random weights, in place of a model"
LAYERS = "build this many layers of the language model, with random weights, and extrapolate (default: all that fit)"
SIZE = "scale the image to this size, which decides the number of tokens for some families"
KEEP = "counts (16) or fractions (0.25) of the visual tokens"


def read_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    try:
        return o.integer(1, 10_000)(width), o.integer(1, 10_000)(height)
    except ValueError:
        raise ValueError("must be WIDTHxHEIGHT in pixels, each from 1 to 10000") from None


@app.command("bench", cls=Command, epilog=EXAMPLES, rich_help_panel="Measure")
@o.takes(o.attaching, o.loading)
def bench(
    ctx: typer.Context,
    model: Annotated[str | None, o.option(o.KNOWN, "ID_OR_FOLDER", o.MODEL, complete=o.complete_models)] = None,
    shape: Annotated[str | None, o.option(SHAPE, "NAME", o.MODEL)] = None,
    layers: Annotated[int | None, o.option(LAYERS, "N", o.MODEL, read=o.integer())] = None,
    method: o.Method = "clustermeans",
    keep: Annotated[Sequence[float], o.option(KEEP, "K...", o.PRUNING, read=o.several(o.read_keep))] = (16, 64, 144),
    settings: o.Settings = None,
    pruning: o.PruningFile = None,
    image: Annotated[str, o.option(o.IMAGE, "IMAGE", o.IMAGES, complete=o.complete_images)] = "sample:cat",
    size: Annotated[Any, o.option(SIZE, "WIDTHxHEIGHT", o.IMAGES, read=read_size)] = "640x480",
    new_tokens: Annotated[int, o.option("tokens to generate", "N", read=o.integer(2))] = 32,
    repeats: Annotated[int, o.option("turns that count, after a first one", "N", read=o.integer())] = 5,
    batch: Annotated[Sequence[int], o.option("batch sizes", "N...", read=o.several(o.integer()))] = (1,),
    threads: Annotated[int | None, o.option("threads of torch on a CPU", "N", read=o.integer(1, 1024))] = None,
    output: Annotated[Path | None, o.option("write JSON, CSV and a plot", "FOLDER", None, "-o", "--output")] = None,
    json: o.AsJson = False,
    **given: Any,
) -> None:
    """Measure how much faster a pruned model is, stage by stage, with memory and FLOPs.

    The unpruned model and every budget take turns. Says where the time goes and what pruning can gain at most.
    """
    if model and shape:
        raise ValueError(f"--model and --shape exclude each other, got {model!r} and {shape!r}")
    source = shape or model or DEFAULT
    config, path = o.read_pruning(ctx, pruning, None if shape else source), image_path(image)
    if not shape:
        folder_of(source)
    if output:
        base.check_folder("--output", output)
    import torch

    from clustrs.corruptions.images import open_image
    from clustrs.evaluation.bench import bench_model, busy_load
    from clustrs.models.configuration import PruningConfig
    from clustrs.models.load import quiet_transformers
    from clustrs.models.shapes import open_model

    options = {name: given[name] for name in CHOICES if name in given}
    made = [config] if config else [PruningConfig(method=make_method(method, k, settings), **options) for k in keep]
    photo, (load, busy) = open_image(path).resize(size), busy_load()
    if busy:
        base.say(
            f"clustrs: the machine is busy (load average {load:.1f}): times are disturbed, ratios of turns less so"
        )
    if threads:
        torch.set_num_threads(threads)
    quiet_transformers()
    with base.status(f"{'building' if shape else 'loading'} {source}"):
        loading = LoadOptions(**{one.name: given[one.name] for one in fields(LoadOptions)})
        opened, processor, whole, scales = open_model(source, bool(shape), layers, loading)
    if len(scales) < sum(scales) and not layers:
        base.say(
            f"clustrs: {len(scales)} of {sum(scales):.0f} layers fit into the free memory; the rest is extrapolated"
        )
    name = f"{source}{' (random weights)' if shape or layers else ''}"
    question = TEXT if shape else "Describe this image."
    measuring: dict[str, Any] = {"new_tokens": new_tokens, "repeats": repeats, "batches": batch, "load": load}
    cut: dict[str, Any] = {"whole": whole, "scales": scales}
    result = bench_model(opened, processor, photo, question, made, name=name, **cut, **measuring)
    tables = [table.terminal(base.width()) for table in result.tables()]
    print(result.to_json() if json else "\n\n".join([result.heading(), *tables, result.sentence()]))
    if output:
        result.save(output)
        base.say(f"clustrs: written to {output}: bench.json, bench.csv, bench.png")
