"""What a model call costs, counted from the model's config alone: FLOPs of every part, bytes of the KV cache.

Only matrix products and convolutions count, a multiply-add as 2 FLOPs; norms, activations and softmax do not.
Attention counts in full, as eager and SDPA kernels with a mask compute it: nothing is saved for the causal half, nor in
prefill for what lies outside a sliding window. Linear attention counts as transformers' own code computes it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from clustrs.models.adapters import adapter_class, list_model_types
from clustrs.models.decoder_cost import decoder_flops, kv_cache_bytes
from clustrs.models.flops import PatchGrid, check_known


@dataclass(frozen=True)
class Cost:
    """FLOPs of one question about one image, part by part, and the bytes of the KV cache after prefill.

    `vision` and `projector` are for all crops, `decode` is for the first token after prefill.
    """

    vision: int
    projector: int
    prefill: int
    decode: int
    kv_bytes: int

    @property
    def first_token(self) -> int:
        """FLOPs until the first new token is known."""
        return self.vision + self.projector + self.prefill


def count_cost(
    config: Any,
    text_tokens: int,
    visual_tokens: int,
    crops: int = 1,
    dtype: torch.dtype = torch.float32,
    grid: PatchGrid | None = None,
) -> Cost:
    """The cost for a prompt of `text_tokens` and `visual_tokens` that survive of an image with `crops` crops.

    `config` is a model's, of a family whose adapter counts its vision tower; `dtype` is the KV cache's. Families that
    take images of any size need the `grid` of the image; the others' crops are all of one size.
    """
    for name, value, least in [
        ("text_tokens", text_tokens, 0),
        ("visual_tokens", visual_tokens, 0),
        ("crops", crops, 1),
    ]:
        if value < least:
            raise ValueError(f"{name}={value!r}: a number of at least {least} is needed")
    tower, projector = vision_flops(config, grid)
    prompt = text_tokens + visual_tokens
    return Cost(
        vision=crops * tower,
        projector=crops * projector,
        prefill=decoder_flops(config.text_config, prompt),
        decode=decoder_flops(config.text_config, 1, cached=prompt),
        kv_bytes=kv_cache_bytes(config.text_config, prompt, dtype),
    )


def vision_flops(config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
    """FLOPs of the tower and of the projector for one crop, or for one image (or video) of that grid."""
    check_known(config, [kind for kind in list_model_types() if adapter_class(kind).counts_vision], "config")
    adapter = adapter_class(config.model_type)
    if not adapter.takes_grid:
        if grid is not None:
            raise ValueError(f"grid={grid!r}: crops of a {config.model_type} model have one size; leave it out")
        return adapter.vision_flops(config)
    if grid is None:
        raise ValueError(f"grid is missing: a {config.model_type} model takes images of any size; give a PatchGrid")
    return adapter.vision_flops(config, grid)
