"""Models with random weights: of a published architecture, or of any configuration, with fewer layers where wanted.

Times, memory and FLOPs do not depend on what the weights are; answers mean nothing. Nothing is downloaded.
"""

from collections import Counter
from copy import deepcopy
from functools import cache
from math import floor
from pathlib import Path
from typing import Any

import torch

from clustrs import validation
from clustrs.embedded import folder_of
from clustrs.models.adapters.base import adapter_class
from clustrs.models.costs import meta_model
from clustrs.models.load import describe, load_arguments, load_config, load_model, load_processor
from clustrs.models.processors import IMAGE_ONLY
from clustrs.validation import LoadOptions

WORD, UNKNOWN = "word", "<unk>"
FILLED = 0.8  # share of the free memory that weights may take


@cache
def shapes() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())


def shape_config(name: str) -> Any:
    from transformers import AutoConfig

    validation.choice("shape", name, list(shapes()))
    return AutoConfig.for_model(**deepcopy(shapes()[name]["config"]))


def shape_processor(name: str) -> Any:
    """Build a published model's processor, with a tokenizer that knows its special tokens and one word."""
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    shape, config = deepcopy(shapes()[name]), shape_config(name)
    tokens: dict[str, tuple[str, int]] = shape["tokens"]
    vocabulary = {UNKNOWN: 0, WORD: 5, **dict(tokens.values())}
    core = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([text for text, _ in tokens.values()])
    named = {key: text for key, (text, _) in tokens.items()}
    words = tf.PreTrainedTokenizerFast(
        tokenizer_object=core, extra_special_tokens=named, padding_side="left", unk_token=UNKNOWN, pad_token=UNKNOWN
    )
    images = getattr(tf, shape["images"].pop("kind"))(**shape["images"])
    kind = getattr(tf, shape["processor"].pop("kind"))
    return IMAGE_ONLY.get(config.model_type, kind)(image_processor=images, tokenizer=words, **shape["processor"])


def layer_types(config: Any) -> list[str]:
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers)


def cut_layers(config: Any, layers: int) -> tuple[Any, list[float]]:
    """Return a config with fewer layers, at least one of each kind, and how many layers each of them stands for."""
    every, text = layer_types(config), config.get_text_config()
    counts = Counter(every)
    if not len(counts) <= layers <= len(every):
        raise ValueError(f"layers must be an integer from {len(counts)} to {len(every)} for this model, got {layers}")
    if getattr(text, "num_kv_shared_layers", None) and layers < len(every):
        raise ValueError(f"layers must be {len(every)} for a {config.model_type} model, whose layers share keys")
    kept = every[:layers]
    for number, kind in enumerate([kind for kind in counts if kind not in kept], 1):
        kept[-number] = kind
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = kept
    own = Counter(kept)
    return config, [counts[kind] / own[kind] for kind in kept]


def weight_bytes(config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of all weights, and of the largest layer of the language model."""
    model = meta_model(config, dtype)
    model.tie_weights()
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.get_decoder().layers]
    return sum(p.nbytes for p in model.parameters()), max(layers)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU, or of a machine with Linux; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def open_model(
    source: str, is_shape: bool, layers: int | None, options: LoadOptions
) -> tuple[Any, Any, Any, list[float]]:
    """Load a model and its processor, or build those of a shape; with `layers` the weights of both are random.

    Of a shape that does not fit into the free memory as many layers are built as fit. Returns the model, its processor,
    the config of the whole model, and how many layers each layer stands for.
    """
    device, arguments = load_arguments(options)
    config = shape_config(source) if is_shape else load_config(source)
    adapter_class(config.model_type)
    every, loaded = layer_types(config), not is_shape and layers is None
    if loaded and "device_map" in arguments:
        return *load_model(source, options), config, [1.0] * len(every)
    given = arguments.pop("dtype")
    dtype = given if isinstance(given, torch.dtype) else getattr(config, "dtype", None) or torch.bfloat16
    (whole, layer), free = weight_bytes(config, dtype), free_bytes(device)
    fit = len(every) if free is None else min(len(every), len(every) + floor((FILLED * free - whole) / layer))
    built = layers or (max(fit, len(set(every))) if is_shape else len(every))
    cut, scales = cut_layers(config, built)
    if built > fit:
        needed = f"{whole / 2**30:.1f} GiB of weights, {(free or 0) / 2**30:.1f} GiB are free"
        advice = f"write --layers {fit}" if fit >= len(set(every)) else "no layers fit"
        raise ValueError(f"{source} with {built} of {len(every)} layers does not fit ({needed}): {advice}")
    if loaded:
        return *load_model(source, options), config, scales
    if "device_map" in arguments:
        raise ValueError(f"random weights can't be loaded with {describe(options)}")
    processor = shape_processor(source) if is_shape else load_processor(str(folder_of(source) or source))
    return random_model(cut, dtype, device, **arguments), processor, config, scales


def random_model(config: Any, dtype: torch.dtype, device: torch.device, **arguments: Any) -> Any:
    """Build a model with small random weights, biases 0, norms 1; `arguments` are those of `from_config`."""
    from transformers import AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    with no_init_weights(), device:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, **arguments).eval()
    model.tie_weights()
    noise = (torch.randn(2**22 - 3, generator=torch.Generator().manual_seed(0)) * 0.02).to(device, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            for block in weight.view(-1).split(len(noise)):  # drawing billions of numbers would take minutes
                block.copy_(noise[: len(block)])
    model.generation_config.pad_token_id = 0
    return model
