"""Load a model and its processor: an embedded one, a folder, or an id of the Hugging Face hub."""

from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from clustrs import validation
from clustrs.corruptions.images import first_sentence
from clustrs.embedded import folder_of
from clustrs.models.configuration import from_config
from clustrs.validation import ImagePadding, LoadOptions

ADVICE = "give a folder that save_pretrained wrote (model and processor), or an id of the Hugging Face hub"
DEFAULTS = LoadOptions()


def local_files(model_id: str) -> Path:
    """Return the folder with a model's files; those of a model of the hub are downloaded if they are not here yet."""
    folder = folder_of(model_id)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        snapshot = Path(snapshot_download(model_id, allow_patterns=patterns))
        if not any(snapshot.rglob("*.safetensors")):
            snapshot = Path(snapshot_download(model_id, allow_patterns=[*patterns, "*.bin"]))
        return snapshot
    except Exception as error:  # the hub and the network raise many kinds
        raise ValueError(f"model {model_id!r} could not be loaded: {first_sentence(error)}; {ADVICE}") from error


def quiet_transformers() -> None:
    """Keep progress bars and warnings of the loading out of the way of the answer."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(model_id: str, options: LoadOptions = DEFAULTS, *, pruned: bool = False) -> tuple[Any, Any]:
    """Load a model and its processor.

    Args:
        model_id: Name of an embedded model, a folder that `save_pretrained` wrote, or an id of the Hugging Face hub.
        options: Device, number format, attention implementation and quantization.
        pruned: Attach the pruning that the checkpoint's `pruning.json` describes.

    Returns:
        The model in evaluation mode, and its processor.

    Raises:
        ValueError: If there is no such model, or it cannot be loaded with these options.

    Examples:
        >>> model, processor = load_model("mini-llava")
        >>> model.config.model_type
        'llava'
    """
    from transformers import AutoModelForImageTextToText

    from clustrs.models.adapters.base import list_model_types

    list_model_types()  # loads plugins: a family of another package may add its model class to transformers
    folder = folder_of(model_id)
    source = model_id if folder is None else str(folder)
    device, arguments = load_arguments(options)
    try:
        processor = load_processor(source)
        model: Any = AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=False, **arguments)
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        advice = f"loaded with {describe(options)}" if options.given() else ADVICE
        raise ValueError(f"model {model_id!r} could not be loaded: {first_sentence(error)}; {advice}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model {model_id!r} has no image processor, only a {type(processor).__name__}")
    model = (model if "device_map" in arguments else model.to(device)).eval()
    if pruned:
        from_config(local_files(model_id))(model, processor=processor)
    return model, processor


def load_config(model_id: str) -> Any:
    """Load a model's config, without its weights; the errors are those of `load_model`."""
    from transformers import AutoConfig

    from clustrs.models.adapters.base import list_model_types

    list_model_types()
    try:
        return AutoConfig.from_pretrained(str(folder_of(model_id) or model_id), trust_remote_code=False)
    except Exception as error:  # transformers and the hub raise many kinds
        raise ValueError(f"model {model_id!r} could not be loaded: {first_sentence(error)}; {ADVICE}") from error


def describe(options: LoadOptions) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.given().items())


def load_arguments(options: LoadOptions) -> tuple[torch.device, dict[str, Any]]:
    """Return the device of a model, and what `from_pretrained` is given."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import is_flash_attn_2_available

    device = resolve_device(options.device)
    if options.device is not None and options.device_map is not None:
        raise ValueError(f"device and device_map exclude each other, got {options.device!r} and {options.device_map!r}")
    usual = "float32" if device.type == "cpu" and options.device_map is None else "auto"
    dtype = options.dtype or usual
    arguments: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if options.attn is not None:
        known = {"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)}
        validation.choice("attn", options.attn, sorted(known))
        if options.attn == "flash_attention_2" and not is_flash_attn_2_available():
            reason = "flash-attn is not installed, or has no GPU here: pip install flash-attn"
            raise ValueError(f"attn={options.attn!r}: {reason}")
        arguments["attn_implementation"] = options.attn
    if options.load_in_8bit or options.load_in_4bit:
        arguments |= {"quantization_config": quantization(options), "device_map": {"": str(device)}}
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    if "device_map" in arguments and find_spec("accelerate") is None:
        raise ValueError(f"{describe(options)}: accelerate is not installed: pip install accelerate")
    return device, arguments


def resolve_device(name: str | None) -> torch.device:
    """Return the device of a name; without one the accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    here = ["cpu"]
    if accelerator:
        here += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    if name not in here and not (accelerator and name == accelerator.type):
        raise ValueError(f"device must be one of {', '.join(here)}, got {name!r}")
    return torch.device(name)


def quantization(options: LoadOptions) -> Any:
    """Return the quantization config of transformers: bitsandbytes, or torchao."""
    if options.load_in_8bit and options.load_in_4bit:
        raise ValueError("load_in_8bit and load_in_4bit exclude each other, got both")
    if find_spec("bitsandbytes") is not None:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=options.load_in_8bit, load_in_4bit=options.load_in_4bit)
    if find_spec("torchao") is not None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig() if options.load_in_8bit else Int4WeightOnlyConfig())
    wanted = "neither bitsandbytes nor torchao is installed: pip install bitsandbytes accelerate"
    raise ValueError(f"{describe(options)}: {wanted}")


def load_processor(source: str, **options: Any) -> Any:
    """Load a folder's or a hub id's processor; for images only where what its video half needs is missing. `options`
    are those of `from_pretrained`."""
    from transformers import AutoConfig, AutoProcessor

    from clustrs.models.processors import IMAGE_ONLY

    torchvision = find_spec("torchvision") is not None
    if not torchvision or find_spec("num2words") is None:
        kind = AutoConfig.from_pretrained(source, trust_remote_code=False, **options).model_type
        if kind in IMAGE_ONLY and (not torchvision or kind == "smolvlm"):
            return IMAGE_ONLY[kind].from_pretrained(source, trust_remote_code=False, **options)
    return AutoProcessor.from_pretrained(source, trust_remote_code=False, **options)


CARRIED_OVER = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std")
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")


def apply_image_padding(processor: Any, padding: ImagePadding = "checkpoint") -> Any:
    """Return a processor that fits images this way; the one given stays as it is."""
    validation.choice("image_padding", padding, get_args(ImagePadding))
    if padding == "checkpoint":
        return processor
    from transformers import LlavaProcessor

    from clustrs.models.processors import SquareImageProcessor

    if not isinstance(processor, LlavaProcessor):
        kind = type(processor).__name__
        raise ValueError(f"image_padding must be 'checkpoint' for {kind}: 'square' is for LLaVA-1.5 (LlavaProcessor)")
    original = processor.image_processor
    settings = {name: value for name in CARRIED_OVER if (value := getattr(original, name, None)) is not None}
    steps = {name: bool(getattr(original, name, None)) for name in STEPS}
    padded = copy(processor)
    padded.image_processor = SquareImageProcessor(do_pad=True, **steps, **settings)
    return padded
