"""Pixels of one crop to visual tokens and scores, for whole batches and without a look at values.

The adapters of `models/` return one object per image and look at prompts and pixels to find the crops. A graph gets one
crop per image, so here are the same steps on batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clustrs.models import scoring
from clustrs.models.adapters import Adapter, towers
from clustrs.models.clock import Clock


@dataclass(frozen=True)
class CropTokens:
    """One crop per image: tokens [B, N, D], scores [B, N], hidden states [B, N, H] (with `cls`, [B, 1 + N, H])."""

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    cls: bool


@dataclass(frozen=True)
class Encoder:
    """How the crops of one family are encoded: the parts of the model that it needs, a function of pixels, and what
    that function takes besides: tensors that are the same for every image."""

    parts: tuple[str, ...]
    encode: Callable[..., CropTokens]
    constants: Callable[[Any], dict[str, Tensor]] = lambda adapter: {}


def encode_llava(adapter: Any, pixels: Tensor) -> CropTokens:
    """LLaVA-1.5, and the base crop of LLaVA-NeXT and LLaVA-OneVision."""
    cls = adapter.check({})
    with adapter.listen({}, Clock(pixels.device)) as listener:
        states = adapter.inner.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        read = torch.cat([states[layer][:, int(cls) :] for layer in adapter.feature_layers({})], -1)
        features = adapter.inner.multi_modal_projector(read)
    encoded = adapter.crops({}, states, listener)
    return CropTokens(features, encoded.scores, torch.cat([encoded.cls_hidden, encoded.hidden], 1), cls)


def encode_gemma(adapter: Any, pixels: Tensor) -> CropTokens:
    """Gemma 3 and PaliGemma."""
    with scoring.listen(adapter.listened_layer(), "received", Clock(pixels.device)) as listener:
        out = adapter.inner.get_image_features(pixels, return_dict=True)
    scores, _ = towers.heard(listener)
    pooled = adapter.pooled(scores[..., None])[..., 0]
    return CropTokens(out.pooler_output, pooled, adapter.pooled(out.last_hidden_state), False)


def encode_internvl(adapter: Any, pixels: Tensor) -> CropTokens:
    """A tile of InternVL."""
    tiles = adapter.encode_tiles(pixels, {}, {}, Clock(pixels.device))
    return CropTokens(tiles.features, tiles.scores, torch.cat([tiles.cls_hidden, tiles.hidden], 1), True)


def encode_idefics3(adapter: Any, pixels: Tensor, position_ids: Tensor) -> CropTokens:
    """A crop of SmolVLM or Idefics3 that fills its square.

    The model's own code looks for padding in the pixels; such a crop has none.
    """
    tower = adapter.inner.vision_model
    embeddings = tower.embeddings
    with scoring.listen(adapter.listened_layer(), adapter.reduction, Clock(pixels.device)) as listener:
        patches = embeddings.patch_embedding(pixels).flatten(2).mT + embeddings.position_embedding(position_ids)
        hidden = tower.post_layernorm(tower.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state)
    scores, _ = towers.heard(listener)
    return CropTokens(
        adapter.inner.connector(hidden), adapter.shuffle(scores[..., None]).mean(-1), adapter.shuffle(hidden), False
    )


def full_positions(adapter: Any) -> dict[str, Tensor]:
    """The position ids [P] that the model's own code gives the patches of a crop without padding.

    They are not always 0 .. P-1: it computes them from fractions of the side, with rounding.
    """
    embeddings = adapter.inner.vision_model.embeddings
    weight, side = embeddings.patch_embedding.weight, embeddings.num_patches_per_side
    seen: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    pixels = weight.new_zeros(1, 3, embeddings.image_size, embeddings.image_size)
    try:
        with torch.no_grad():
            embeddings(pixels, patch_attention_mask=torch.ones(1, side, side, dtype=torch.bool, device=weight.device))
    finally:
        hook.remove()
    return {"position_ids": seen[0]}


LLAVA = Encoder(("vision_tower", "multi_modal_projector"), encode_llava)
GEMMA = Encoder(("vision_tower", "multi_modal_projector"), encode_gemma)
INTERNVL = Encoder(("vision_tower", "multi_modal_projector"), encode_internvl)
IDEFICS3 = Encoder(("vision_model", "connector"), encode_idefics3, full_positions)
ENCODERS = {
    "llava": LLAVA,
    "llava_next": LLAVA,
    "llava_onevision": LLAVA,
    "gemma3": GEMMA,
    "paligemma": GEMMA,
    "internvl": INTERNVL,
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3,
}
"""By `config.model_type`: the families whose crops have one fixed size."""


def encoder_of(adapter: Adapter) -> Encoder:
    """The encoder of a model's family; an error for families whose images have no fixed size."""
    kind = adapter.config.model_type
    if kind not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ValueError(f"a model of type {kind!r} has no crops of one fixed size to export: known are {known}")
    return ENCODERS[kind]


def vision_parts(adapter: Adapter) -> nn.ModuleDict:
    """The modules that the encoder calls, so that a graph has their weights and not the language model's."""
    return nn.ModuleDict({name: getattr(adapter.inner, name) for name in encoder_of(adapter).parts})


def image_size(adapter: Adapter) -> tuple[int, int]:
    """Height and width of a crop in pixels."""
    size = adapter.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)
