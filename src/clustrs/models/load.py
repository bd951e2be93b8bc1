"""Load a model and its processor: an embedded one, a folder, or an id of the Hugging Face hub."""

from pathlib import Path
from typing import Any

import torch

from clustrs.embedded import MODELS, model_folder
from clustrs.images.open import first_sentence


def load_model(model_id: str) -> tuple[Any, Any]:
    """A model and its processor: an embedded one, or from a folder or the Hugging Face hub. Float32 on a CPU, its own
    type elsewhere."""
    from transformers import AutoModelForImageTextToText

    from clustrs.models.processors import load_processor

    expanded = model_folder(model_id) if model_id in MODELS else Path(model_id).expanduser()
    if not expanded.exists() and (model_id.startswith((".", "/", "~")) or model_id.count("/") > 1):
        raise ValueError(f"model {model_id!r}: there is no such folder")
    source = str(expanded) if expanded.exists() else model_id
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        processor = load_processor(source)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            source, dtype=torch.float32 if accelerator is None else "auto"
        )
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        advice = "give a folder that save_pretrained wrote (model and processor), or an id of the Hugging Face hub"
        raise ValueError(f"model {model_id!r} could not be loaded: {first_sentence(error)}; {advice}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model {model_id!r} has no image processor, only a {type(processor).__name__}")
    return model.to(accelerator or "cpu").eval(), processor
