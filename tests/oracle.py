"""Pruning done by hand, with as little of the library as possible: the oracle for the attached models."""

from typing import Any

import torch
from tiny_models import GRID, PATCHES
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from clustrs import Layout, Pruner, PrunerInputs, Selection
from clustrs.pruners.inputs import FURTHER


def eager_attentions(model: Any, pixels: Tensor) -> Any:
    """The attention [crops, heads, tokens, tokens] of every layer, as the eager implementation reports it."""
    inner = getattr(model, "model", model)
    before = inner.vision_tower.config._attn_implementation
    inner.vision_tower.set_attn_implementation("eager")
    try:
        return inner.vision_tower(pixels, output_attentions=True, output_hidden_states=True).attentions
    finally:
        inner.vision_tower.set_attn_implementation(before)


def eager_scores(model: Any, pixels: Tensor, cls: bool) -> Tensor:
    """Scores [crops, 16] as eager attention reports them, from the layer that the projector reads."""
    layer = getattr(model, "model", model).config.vision_feature_layer
    attention: Tensor = eager_attentions(model, pixels)[layer]
    return attention[:, :, 0, 1:].mean(1) if cls else attention.mean((1, 2))


def projections(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and keys [crops, tokens, 32] of that layer."""
    inner = getattr(model, "model", model)
    found: dict[str, Tensor] = {}
    stack = inner.vision_tower.encoder
    block = (stack.layers if hasattr(stack, "layers") else stack.layer)[inner.config.vision_feature_layer]
    attention = block.self_attn if hasattr(block, "self_attn") else block.attention
    hooks = []
    for name, other in (("q_proj", "query"), ("k_proj", "key")):
        module = getattr(attention, name) if hasattr(attention, name) else getattr(attention.attention, other)
        hooks.append(module.register_forward_hook(lambda module, args, out, name=name: found.update({name: out})))
    inner.vision_tower(pixels)
    for hook in hooks:
        hook.remove()
    return found["q_proj"], found["k_proj"]


def keys_of(model: Any, pixels: Tensor) -> Tensor:
    """The key projections [crops, tokens, 8] of that layer, mean over heads."""
    return projections(model, pixels)[1].unflatten(-1, (4, -1)).mean(2)


def further(model: Any, pixels: Tensor, cls: bool) -> dict[str, Tensor]:
    """Inputs of methods that read further layers, [crops, 16, ...]; the first of three layers is early and middle."""
    attentions, first = eager_attentions(model, pixels), int(cls)
    received, middle = (
        attentions[i].mean((1, 2))[:, first:] for i in (getattr(model, "model", model).config.vision_feature_layer, 0)
    )
    query, key = projections(model, pixels)
    early = attentions[0][:, :, 0, 1:].mean(1) if cls else middle
    joint = (query[:, :1] @ key.mT / query.shape[-1] ** 0.5).softmax(-1)[:, 0, 1:] if cls else received
    scores = {"received": received, "object_scores": middle, "early_scores": early, "joint_scores": joint}
    return {**{name: part[..., None] for name, part in scores.items()}, "joint_keys": key[:, first:]}


def anyres(model: Any, crops: Tensor, size: Any) -> Tensor:
    """A map [crops, 16, C] of an anyres image, packed without newlines: base first, then the unpadded grid."""
    inner = getattr(model, "model", model)
    if len(crops) == 1:
        return crops[0]
    rows, columns = get_anyres_image_grid_shape(size, inner.config.image_grid_pinpoints, 28)
    grid = torch.zeros(crops.shape[-1], rows * GRID, columns * GRID)
    for number, crop in enumerate(crops[1:]):
        y, x = number // columns * GRID, number % columns * GRID
        for place, value in enumerate(crop):
            grid[:, y + place // GRID, x + place % GRID] = value
    grid = unpad_image(grid, size)
    return torch.cat([crops[0], grid.flatten(1).T])


def cells(crops: int) -> Tensor:
    """Tile, y and x of every token of every crop: [crops, 16, 3]."""
    rows = [[[crop, cell // GRID, cell % GRID] for cell in range(PATCHES)] for crop in range(crops)]
    return torch.tensor(rows, dtype=torch.float32)


def select(
    model: Any,
    method: Pruner,
    inputs: dict[str, Any],
    cls: bool,
    base_only: bool = False,
    question: Tensor | None = None,
) -> Selection:
    """What a method keeps of the only image of a call."""
    inner = getattr(model, "model", model)
    pixels = inputs["pixel_values"].flatten(0, -4)
    with torch.no_grad():
        hidden = inner.vision_tower(pixels, output_hidden_states=True).hidden_states[inner.config.vision_feature_layer]
        first = int(cls)
        tokens = inner.multi_modal_projector(hidden[:, first:])
        parts = [
            tokens,
            eager_scores(model, pixels, cls)[..., None],
            hidden[:, first:],
            keys_of(model, pixels)[:, first:],
            cells(len(pixels)),
            *further(model, pixels, cls).values(),
        ]
        if "image_sizes" in inputs:
            parts = [anyres(model, part, inputs["image_sizes"][0]) for part in parts]
        else:
            parts = [part[0] for part in parts]
        if base_only:
            parts = [part[:PATCHES] for part in parts]
        tokens, scores, patches, keys, cell, *others = parts
        *rest, joint_keys = others
        given = PrunerInputs(
            tokens,
            scores[:, 0],
            Layout(*cell.long().unbind(1)),
            torch.cat([hidden[0, :first], patches]),
            torch.cat([keys_of(model, pixels)[0, :first], keys]),
            inner.multi_modal_projector,
            cls,
            question,
            **dict(zip(FURTHER, (*(part[:, 0] for part in rest), joint_keys), strict=True)),
        )
        return method.select(given)


def embeddings(model: Any, ids: Tensor, rows: list[Tensor]) -> Tensor:
    """[1, S', D]: the text's embeddings, and each image's rows in place of its run of placeholders."""
    inner = getattr(model, "model", model)
    table = inner.get_input_embeddings()
    parts, image, inside = [], iter(rows), False
    for token in ids[0]:
        if token == inner.config.image_token_id:
            if not inside:
                parts.append(next(image))
            inside = True
        else:
            parts.append(table(token[None]))
            inside = False
    return torch.cat(parts)[None]
