"""Modules for tracing: the vision part of a model with its pruning, and the selection alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clustrs import validation
from clustrs.models import scoring
from clustrs.models.adapters.base import Adapter, get_adapter, recorded
from clustrs.models.attach import MARK, unwrap
from clustrs.models.scoring import StageTimer
from clustrs.pruners import Pruner, list_methods, method_class


@dataclass(frozen=True)
class CropTokens:
    """One crop per image: tokens [B, N, D], scores [B, N], hidden states [B, N, H] (with `cls`, [B, 1 + N, H])."""

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    cls: bool


@dataclass(frozen=True)
class Encoder:
    """Encoder for the crops of one family: the parts of the model it needs, a function of pixels, and the constant
    tensors that the function takes besides."""

    parts: tuple[str, ...]
    encode: Callable[..., CropTokens]
    constants: Callable[[Any], dict[str, Tensor]] = lambda adapter: {}


def encode_llava(adapter: Any, pixels: Tensor) -> CropTokens:
    """LLaVA-1.5, and the base crop of LLaVA-NeXT and LLaVA-OneVision."""
    cls = adapter.check({})
    with adapter.record({}, StageTimer(pixels.device)) as recorder:
        features, states = adapter.run_tower(pixels, {})
    encoded = adapter.crops({}, states, recorder)
    return CropTokens(features, encoded.scores, torch.cat([encoded.cls_hidden, encoded.hidden], 1), cls)


def encode_gemma(adapter: Any, pixels: Tensor) -> CropTokens:
    """Gemma 3 and PaliGemma."""
    with scoring.record_scores(adapter.scoring_layer(), "received", StageTimer(pixels.device)) as recorder:
        out = adapter.inner.get_image_features(pixels, return_dict=True)
    scores, _ = recorded(recorder)
    pooled = adapter.pooled(scores[..., None])[..., 0]
    return CropTokens(out.pooler_output, pooled, adapter.pooled(out.last_hidden_state), False)


def encode_internvl(adapter: Any, pixels: Tensor) -> CropTokens:
    """A tile of InternVL."""
    tiles = adapter.encode_tiles({"pixel_values": pixels}, {}, StageTimer(pixels.device))
    return CropTokens(tiles["features"], tiles["scores"], torch.cat([tiles["cls_hidden"], tiles["hidden"]], 1), True)


def encode_idefics3(adapter: Any, pixels: Tensor, position_ids: Tensor) -> CropTokens:
    """A crop of SmolVLM or Idefics3 that fills its square.

    The model's own code looks for padding in the pixels; such a crop has none.
    """
    tower = adapter.inner.vision_model
    embeddings = tower.embeddings
    with scoring.record_scores(adapter.scoring_layer(), adapter.reduction, StageTimer(pixels.device)) as recorder:
        patches = embeddings.patch_embedding(pixels).flatten(2).mT + embeddings.position_embedding(position_ids)
        hidden = tower.post_layernorm(tower.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state)
    scores, _ = recorded(recorder)
    return CropTokens(
        adapter.inner.connector(hidden), adapter.shuffle(scores[..., None]).mean(-1), adapter.shuffle(hidden), False
    )


def full_positions(adapter: Any) -> dict[str, Tensor]:
    """Return the position ids [P] that the model's own code assigns to the patches of a crop without padding.

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
    """Return the encoder of a model's family; families whose images vary in size are refused."""
    kind = adapter.config.model_type
    if kind not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ValueError(f"model type {kind!r} has no crops of a fixed size to export (supported: {known})")
    return ENCODERS[kind]


def vision_parts(adapter: Adapter) -> nn.ModuleDict:
    """Return the modules that the encoder calls: a graph holds their weights and not the language model's."""
    return nn.ModuleDict({name: getattr(adapter.inner, name) for name in encoder_of(adapter).parts})


def image_size(adapter: Adapter) -> tuple[int, int]:
    """Return height and width of a crop in pixels."""
    size = adapter.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


EXAMPLES = 2
"""Images in the batch that is traced: with one, the graph would be for batches of one."""


class PrunedVision(nn.Module):
    """Vision tower, scoring, projector and selection of a model: pixels [B, 3, H, W] to tokens [B, k, D] and their
    indices [B, k] among the N tokens of a crop.

    The image is one crop of the model's fixed size: the whole image for LLaVA-1.5, Gemma 3 and PaliGemma, the base crop
    of LLaVA-NeXT and LLaVA-OneVision, a tile of InternVL, a crop of SmolVLM and Idefics3.
    """

    def __init__(self, model: Any, method: Pruner) -> None:
        super().__init__()
        check_exportable(method)
        model = unwrap(model)
        if MARK in model.__dict__:
            raise ValueError("a method is attached to this model: remove it first (handle.remove())")
        self.method, self.adapter = method, get_adapter(model)
        self.encoder = encoder_of(self.adapter)
        self.parts = vision_parts(self.adapter).eval()
        constants = self.encoder.constants(self.adapter)
        self.constants = tuple(constants)
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def model_type(self) -> str:
        """The family of the model."""
        return str(self.adapter.config.model_type)

    def encode(self, pixel_values: Tensor) -> CropTokens:
        """Encode crops: all their tokens, and the scores."""
        constants = {name: getattr(self, name) for name in self.constants}
        return self.encoder.encode(self.adapter, pixel_values, **constants)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        crops = self.encode(pixel_values)
        selection = self.method.select(crops.tokens, crops.scores, hidden=crops.hidden, cls=crops.cls, check=False)
        return selection.tokens, selection.indices

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        """Return black images to trace with."""
        weight = next(self.parts.parameters())
        return {"pixel_values": torch.zeros(batch, 3, *image_size(self.adapter), dtype=weight.dtype)}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Record the tower's attention while it is traced."""
        with scoring.hooked(self.adapter.scoring_layer()):
            yield


class TokenSelection(nn.Module):
    """The selection alone: tokens [B, N, D] and the encoder's attention to them [B, N] to tokens [B, k, D] and their
    indices [B, k].

    tokens: N. dim: D. hidden_dim: width of the hidden states [B, N, H] that VisPruner compares; others take none.
    cls: whether the attention is that of a CLS token; if not, ClustRS adds salience.
    """

    def __init__(
        self, method: Pruner, tokens: int, dim: int, *, hidden_dim: int | None = None, cls: bool = True
    ) -> None:
        super().__init__()
        check_exportable(method)
        validation.integer("tokens", tokens, 1)
        validation.integer("dim", dim, 1)
        if method.count(tokens) == tokens:
            raise ValueError(f"keep must be fewer than all {tokens} tokens, got {method.keep!r}")
        needs_hidden = "hidden" in method.requirements()
        if needs_hidden != (hidden_dim is not None):
            wanted = "the width of the hidden states it compares" if needs_hidden else "None, it uses no hidden states"
            raise ValueError(f"hidden_dim for {method.name} must be {wanted}, got {hidden_dim!r}")
        if hidden_dim is not None:
            validation.integer("hidden_dim", hidden_dim, 1)
        self.method, self.tokens, self.dim, self.hidden_dim, self.cls = method, tokens, dim, hidden_dim, cls

    def forward(
        self, tokens: Tensor, attention: Tensor | None = None, hidden_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden_states
        if hidden is not None and self.cls:  # methods skip the place of the CLS token
            hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
        selection = self.method.select(tokens, attention, hidden=hidden, cls=self.cls, check=False)
        return selection.tokens, selection.indices

    def example_inputs(self, batch: int = EXAMPLES) -> dict[str, Tensor]:
        """Return zeros in the shapes of the inputs that the method needs."""
        inputs = {"tokens": torch.zeros(batch, self.tokens, self.dim)}
        if "scores" in self.method.requirements():
            inputs["attention"] = torch.zeros(batch, self.tokens)
        if self.hidden_dim is not None:
            inputs["hidden_states"] = torch.zeros(batch, self.tokens, self.hidden_dim)
        return inputs

    def tracing(self) -> Any:
        """Do nothing: a selection needs no preparation."""
        return nullcontext()


def check_exportable(method: Pruner) -> None:
    """Raise ValueError for a method that cannot be exported."""
    if not method.exportable:
        exportable = ", ".join(name for name in list_methods() if method_class(name).exportable)
        raise ValueError(f"method {method.name!r} cannot be exported (exportable: {exportable})")


def trace(module: PrunedVision | TokenSelection) -> ExportedProgram:
    """Export a module with `torch.export` for batches of any size, for ONNX and ExecuTorch."""
    inputs = module.example_inputs()
    batch = Dim("batch")
    with torch.no_grad(), module.tracing():
        return torch.export.export(
            module, (), kwargs=inputs, dynamic_shapes={name: {0: batch} for name in inputs}, strict=False
        )
