"""Load a model and its processor: an embedded one, a folder, or an id of the Hugging Face hub."""

import os
from pathlib import Path
from typing import Any

import torch

from clustrs.embedded import MODELS, model_folder
from clustrs.images.open import first_sentence

ADVICE = "give a folder that save_pretrained wrote (model and processor), or an id of the Hugging Face hub"


def folder_of(model_id: str) -> Path | None:
    """The folder of an embedded model, or the one that is given; None for an id of the Hugging Face hub."""
    expanded = model_folder(model_id) if model_id in MODELS else Path(os.path.expanduser(model_id))
    if os.path.exists(expanded):  # unlike Path.exists, also for names that are too long
        return expanded
    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
        raise ValueError(f"model {model_id!r}: there is no such folder")
    return None


def local_files(model_id: str) -> Path:
    """The folder with a model's files; those of a model of the hub are downloaded if they are not here yet."""
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


def load_model(model_id: str) -> tuple[Any, Any]:
    """A model and its processor: an embedded one, or from a folder or the Hugging Face hub. Float32 on a CPU, its own
    type elsewhere."""
    from transformers import AutoModelForImageTextToText

    from clustrs.models.processors import load_processor

    folder = folder_of(model_id)
    source = model_id if folder is None else str(folder)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        processor = load_processor(source)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            source, dtype=torch.float32 if accelerator is None else "auto", trust_remote_code=False
        )
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        raise ValueError(f"model {model_id!r} could not be loaded: {first_sentence(error)}; {ADVICE}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model {model_id!r} has no image processor, only a {type(processor).__name__}")
    return model.to(accelerator or "cpu").eval(), processor
