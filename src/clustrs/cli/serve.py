"""`clustrs serve` and `clustrs encode`: pruned models in vLLM, and pruned images for a server elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clustrs.cli import terminal
from clustrs.cli.arguments import everything_else, option, positional
from clustrs.cli.commands import command
from clustrs.cli.options import ModelOptions
from clustrs.cli.question import check_settings
from clustrs.embedded import image_path

PANEL = "Serve"
EXAMPLES = """\
examples:
  clustrs serve llava-hf/llava-1.5-7b-hf --keep 64
  clustrs serve llava-hf/llava-1.5-7b-hf --keep 0.25 --method divprune --tensor-parallel-size 2 --port 8001
  clustrs serve mini-llava --keep 16 --dtype float32 --enforce-eager      the embedded model, on a CPU
"""
ENCODE_EXAMPLES = """\
examples:
  clustrs encode cat.jpg dog.jpg --model llava-hf/llava-1.5-7b-hf --keep 16 -o encoded
  clustrs encode sample:scene-1 --model mini-llava --keep 16 -o encoded
"""


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What is kept of each image."""

    method: str = option("clustrs", "how to choose the tokens", metavar="METHOD")
    keep: int | float = option(..., "how many visual tokens stay of each image: a count (64) or a fraction (0.25)")
    set: Mapping[str, Any] = option({}, "a parameter of the method, for example tau=2", metavar="KEY=VALUE")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PruneOptions):
    """The options of `clustrs serve`."""

    model: str = positional("a folder, a Hugging Face id, or the embedded mini-llava or mini-onevision", "MODEL")
    vllm: tuple[str, ...] = everything_else("any option of vllm serve", "[VLLM_OPTIONS]...")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(ModelOptions, PruneOptions):
    """The options of `clustrs encode`."""

    images: tuple[str, ...] = positional("image files, or sample:NAME (see clustrs samples)", "IMAGE...")
    save_dtype: Literal["float16", "bfloat16", "float32"] = option("float16", "type of the numbers that are written")
    output: Path = option(..., "folder for one .safetensors file per image", "-o", "--output", metavar="FOLDER")


@command("serve", panel=PANEL, examples=EXAMPLES)
def run_serve(options: ServeOptions) -> None:
    """Start vLLM's OpenAI-compatible server with a pruned model.

    Says in one line what is pruned to what. Everything that can be wrong with the pruning is found before vLLM starts;
    all other options go to vLLM.
    """
    from clustrs.serving import server

    check_settings(options.set)
    settings = {"method": options.method, "keep": options.keep, **options.set}
    server.serve(server.prepare(options.model, settings, options.vllm))


@command("encode", panel=PANEL, examples=ENCODE_EXAMPLES)
def run_encode(options: EncodeOptions) -> None:
    """Encode and prune images for a vLLM server on another machine.

    Writes the embeddings [1, k, D] that vllm serve --enable-mm-embeds takes in the place of an image. vLLM has no
    DINOv2 tower, so give --model; what photo-llava, the default, writes is for other runtimes.
    """
    from clustrs.models.load import load_model, quiet_transformers
    from clustrs.pruners import get_method
    from clustrs.serving import embeddings

    check_settings(options.set)
    method = get_method(options.method, keep=options.keep, **options.set)
    files = embeddings.output_files([image_path(image) for image in options.images], options.output)
    quiet_transformers()
    with terminal.status(f"loading {options.model}"):
        model, processor = load_model(options.model, options.load_options())
    for line in embeddings.encode_files(model, processor, files, method, options.save_dtype, options.model):
        print(line)
