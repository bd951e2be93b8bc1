"""`clustrs serve`, `encode` and `export-onnx`: pruned models in vLLM and in edge runtimes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.ask import make_method
from clustrs.cli.base import Command, app
from clustrs.embedded import DEFAULT, image_path
from clustrs.validation import Attention, LoadOptions, Positions

PANEL, ALONE = "Deploy", "The selection alone"
SERVE_EXAMPLES = """\
examples:
  clustrs serve llava-hf/llava-1.5-7b-hf --keep 64
  clustrs serve llava-hf/llava-1.5-7b-hf --keep 0.25 --method divprune
  clustrs serve llava-hf/llava-1.5-7b-hf --keep 64 --keep-range 16 256
  clustrs serve mini-llava --keep 16 --dtype float32 --enforce-eager
The second has a budget per request; the last is an embedded model, on a CPU.
vLLM's own options follow: --tensor-parallel-size 2 --port 8001
"""
ENCODE_EXAMPLES = """\
examples:
  clustrs encode cat.jpg --model llava-hf/llava-1.5-7b-hf --keep 16 -o encoded
  clustrs encode sample:scene-1 --model mini-llava --keep 16 -o encoded
"""
ONNX_EXAMPLES = """\
examples:
  clustrs export-onnx mini-llava --keep 16 -o vision-16.onnx
  clustrs export-onnx --tokens 576 --dim 4096 --keep 16 -o select.onnx
The first has tower, scoring, projector and selection, the other the selection.
"""
KEEP = "visual tokens kept of each image: a count (64) or a fraction (0.25)"
RANGE = "smallest and largest budget that a request may ask for; without it, none may"
Budget = Annotated[float | None, o.option(KEEP, "K", o.PRUNING, read=o.read_keep)]
Range = Annotated[Sequence[float] | None, o.option(RANGE, "FLOOR CEILING...", o.PRUNING, read=o.several(o.read_keep))]
PLAIN = "plain: each kept token counts once; vLLM's kernels take no bias, so proportional is refused"
SERVED = "a folder, a Hugging Face id, or the embedded mini-llava or mini-onevision"
EXPORTED = "a folder, a Hugging Face id, or an embedded model; clustrs models --matrix has the families"
SaveDtype = Literal["float16", "bfloat16", "float32"]
GraphDtype = Literal["float32", "float16"]
PASS_ON = {"ignore_unknown_options": True}


@app.command("serve", cls=Command, epilog=SERVE_EXAMPLES, rich_help_panel=PANEL, context_settings=PASS_ON)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=SERVED, autocompletion=o.complete_models)],
    ctx: typer.Context,
    keep: Budget = None,
    keep_range: Range = None,
    method: o.Method = "clustrs",
    pruning: o.PruningFile = None,
    settings: o.Settings = None,
    positions: Annotated[Positions, o.option(o.POSITIONS, panel=o.PRUNING, choices=Positions)] = "auto",
    attention: Annotated[Attention, o.option(PLAIN, panel=o.PRUNING, choices=Attention)] = "plain",
    vllm: Annotated[list[str] | None, typer.Argument(metavar="VLLM_OPTIONS...", help="options of vllm serve")] = None,
) -> None:
    """Start vLLM's OpenAI-compatible server with a pruned model.

    Prints the method and the budget. Everything that can be wrong with the pruning is found before vLLM starts; vLLM
    gets all other options.
    """
    described = {"method": method, "keep": keep, **(settings or {}), "positions": positions, "attention": attention}
    if config := o.read_pruning(ctx, pruning, model, refused=["scope", "crops", "deepstack"]):
        parameters = config.method.to_dict()
        described = {"method": parameters.pop("name"), **parameters}
        described |= {"positions": config.positions, "attention": config.attention}
    elif keep is None:
        raise ValueError(f"serve needs --keep K ({KEEP}), or --pruning FILE")
    if keep_range is not None:
        described["keep_range"] = list(keep_range)
    from clustrs.serving import server

    server.serve(model, described, tuple(vllm or ()))


@app.command("encode", cls=Command, epilog=ENCODE_EXAMPLES, rich_help_panel=PANEL)
@o.takes(o.loading)
def encode(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help=o.IMAGE, autocompletion=o.complete_images)],
    ctx: typer.Context,
    output: o.OutputFolder,
    keep: Budget = None,
    method: o.Method = "clustrs",
    pruning: o.PruningFile = None,
    settings: o.Settings = None,
    model: o.Model = DEFAULT,
    save_dtype: Annotated[SaveDtype, o.option("type of the numbers that are written", choices=SaveDtype)] = "float16",
    **given: Any,
) -> None:
    """Encode and prune images for a vLLM server on another machine.

    Writes one .safetensors file per image with the embeddings [1, k, D] that vllm serve --enable-mm-embeds takes in
    the place of an image. vLLM has no DINOv2 tower, so give --model; what photo-llava, the default, writes is for
    other runtimes.
    """
    from clustrs.corruptions.images import open_image
    from clustrs.serving import embeddings

    config = o.read_pruning(ctx, pruning, model, refused=["scope", "crops", "deepstack"])
    if config is None and keep is None:
        raise ValueError(f"encode needs --keep K ({KEEP}), or --pruning FILE")
    pruner, files = config.method if config else make_method(method, keep, settings), dict[Path, Path]()
    for path in map(image_path, images):
        file = output / f"{path.stem}.safetensors"
        if file in files.values():
            raise ValueError(f"image {str(path)!r}: another one is written to {str(file)!r}, too; rename one of them")
        files[path] = file
    loaded, processor = base.load_model(model, LoadOptions(**given))
    for path, file in files.items():
        tokens, before = embeddings.encode_image(loaded, processor, open_image(path), pruner)
        output.mkdir(parents=True, exist_ok=True)
        facts = {"model": model, "method": pruner.to_dict(), "tokens_before": before}
        embeddings.save_embeddings(file, tokens, save_dtype, **facts)
        print(f"{file}: {before} -> {tokens.shape[1]} visual tokens, {file.stat().st_size} bytes")


def size(of: str, metavar: str) -> Any:
    return o.option(f"without a model: {of}", metavar, ALONE, read=o.integer())


@app.command("export-onnx", cls=Command, epilog=ONNX_EXAMPLES, rich_help_panel=PANEL)
def export_onnx(
    ctx: typer.Context,
    output: Annotated[Path, o.option("the .onnx file; a .json file describes it", "FILE", None, "-o", "--output")],
    model: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help=EXPORTED, autocompletion=o.complete_models)
    ] = None,
    method: o.Method = "clustrs",
    pruning: o.PruningFile = None,
    keep: o.Keep = None,
    settings: o.Settings = None,
    dtype: Annotated[GraphDtype, o.option("type of weights, pixels and features", choices=GraphDtype)] = "float32",
    tokens: Annotated[int | None, size("tokens of an image", "N")] = None,
    dim: Annotated[int | None, size("width of the tokens", "D")] = None,
    hidden_dim: Annotated[int | None, size("width of the hidden states, for vispruner", "H")] = None,
) -> None:
    """Write a vision encoder with its pruning as one ONNX graph.

    Pixels in, k visual tokens out; without a model, the selection alone.
    """
    base.check_file("--output", output)
    sizes = {"tokens": tokens, "dim": dim, "hidden_dim": hidden_dim}
    given = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is not None]
    for name, values in (("MODEL must be one model", model), ("--keep must be one budget for a graph", keep)):
        if values and len(values) > 1:
            raise ValueError(f"{name}, got {' '.join(map(str, values))}")
    if model and given:
        raise ValueError(f"{given[0]} is for the selection alone, got a model, too")
    if not model and (tokens is None or dim is None):
        raise ValueError("export-onnx needs a model, or --tokens and --dim for the selection alone")
    if not model and dtype != "float32":
        raise ValueError(f"--dtype must be float32 for the selection alone, got {dtype}")
    config = o.read_pruning(ctx, pruning, model[0] if model else None, refused=["scope", "crops", "deepstack"])
    pruner = config.method if config else make_method(method, keep[0] if keep else None, settings)
    from clustrs import export

    if model:
        loaded = base.load_model(model[0], LoadOptions())[0].cpu()
        info = export.export_onnx(loaded.half() if dtype == "float16" else loaded, pruner, output)
    else:
        info = export.export_selection(pruner, output, **sizes)  # type: ignore[arg-type]
    print(f"{output}: {pruner.name} keeps {info.kept} of {info.tokens} tokens of {info.dim} numbers, {info.dtype}")
    print(f"{output.with_suffix('.json')}: method, parameters, inputs, outputs, versions")
