"""Encode and prune images on one machine for a vLLM server on another, which needs no plugin.

`vllm serve ... --enable-mm-embeds` takes ready embeddings [1, k, D] in the place of an image.
"""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clustrs import validation
from clustrs.models.adapters.base import get_adapter
from clustrs.models.scoring import StageTimer
from clustrs.models.select import select_tokens
from clustrs.pruners.base import Pruner
from clustrs.serving.plugin import LLAVA

NAME = "image_embeds"  # name of the tensor in a file, and of the chat message part that carries it
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@torch.inference_mode()
def encode_image(model: Any, processor: Any, image: Image.Image, method: Pruner) -> tuple[Tensor, int]:
    """Encode and prune an image: its tokens [1, k, D], and the number of tokens before pruning."""
    name = type(model).__name__
    if name not in LLAVA:  # vLLM wants more than [1, k, D] of others
        raise ValueError(f"model must be {' or '.join(LLAVA)}, got {name}: vLLM takes its images as pixels only")
    adapter = get_adapter(model)
    adapter.records = method.requirements()
    inputs = processor(images=adapter.batch_images([image]), text=[processor.image_token], return_tensors="pt")
    (encoded,) = adapter.encode(dict(inputs.to(model.device, model.dtype)), StageTimer(model.device))
    ((selection, everything),) = select_tokens(method, [encoded], "image")
    return (encoded.features if everything else selection.tokens)[None], encoded.slots


def save_embeddings(path: Path, embeddings: Tensor, dtype: str, **facts: Any) -> None:
    """Write [1, k, D] as safetensors, with facts about it as metadata."""
    from safetensors.torch import save_file

    validation.choice("dtype", dtype, DTYPES)
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    save_file({NAME: embeddings.to("cpu", DTYPES[dtype]).contiguous()}, path, metadata)


def message_part(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the part of a chat message that carries the embeddings in a file, in the place of an image."""
    from safetensors.torch import load_file

    tensor, written = load_file(path)[NAME], io.BytesIO()
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # which NumPy does not have
    np.save(written, tensor.numpy(), allow_pickle=False)
    return {"type": NAME, NAME: base64.b64encode(written.getvalue()).decode()}
