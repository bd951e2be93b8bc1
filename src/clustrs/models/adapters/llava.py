"""LLaVA-1.5: one crop per image, no newlines. Also what its successors have in common with it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models import scoring
from clustrs.models.adapters import towers
from clustrs.models.adapters.base import Adapter, VisualTokens, setting
from clustrs.models.adapters.registry import register_adapter
from clustrs.models.clock import Clock
from clustrs.models.flops import PatchGrid
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@dataclass(frozen=True)
class EncodedCrops:
    """What tower and scoring say of all crops: scores [C, P], hidden states and keys, the CLS token apart."""

    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    side: int


@register_adapter
class LlavaAdapter(Adapter):
    """LLaVA-1.5, with a CLIP, SigLIP or DINOv2 tower."""

    model_types = ("llava",)
    tokens_per_image = "576 (CLIP ViT-L/14 at 336 px)"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches"
    counts_vision = True
    consumed: ClassVar[tuple[str, ...]] = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy")
    feature_arguments: ClassVar[tuple[str, ...]] = ("vision_feature_layer", "vision_feature_select_strategy")

    def listened_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        return towers.attention_layer(self.inner.vision_tower, self.feature_layers(inputs or {})[-1])

    def feature_layers(self, inputs: dict[str, Any]) -> list[int]:
        """The hidden states that the projector reads, side by side."""
        layer = setting(self.config, inputs, "vision_feature_layer")
        return [layer] if isinstance(layer, int) else list(layer)

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the call that the model's own encoding takes."""
        return {name: inputs[name] for name in self.feature_arguments if inputs.get(name) is not None}

    def check(self, inputs: dict[str, Any]) -> bool:
        """Whether the tower has a CLS token, which the projector must then not read."""
        cls = towers.has_cls(self.inner.vision_tower)
        strategy = setting(self.config, inputs, "vision_feature_select_strategy")
        if (strategy == "default") != cls:
            other = "default" if cls else "full"
            raise ValueError(f"vision_feature_select_strategy={strategy!r} does not suit this tower: give {other!r}")
        return cls

    def crops(self, inputs: dict[str, Any], hidden_states: Any, listener: scoring.Listener) -> EncodedCrops:
        """Scores, hidden states and keys of all crops."""
        scores, keys = towers.heard(listener)
        hidden = torch.cat([hidden_states[i] for i in self.feature_layers(inputs)], -1)
        first = int(towers.has_cls(self.inner.vision_tower))
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        return EncodedCrops(scores, hidden[:, first:], keys[:, first:], hidden[:, :first], keys[:, :first], side)

    def listen(self, inputs: dict[str, Any], clock: Clock) -> Any:
        return scoring.listen(self.listened_layer(inputs), towers.reduction(self.inner.vision_tower), clock)

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        return towers.tower_flops(config.vision_config), projector_flops(config)

    def encode(self, inputs: dict[str, Any], clock: Clock, crops: Crops = "all") -> list[VisualTokens]:
        self.check(inputs)
        with clock.time("vision"), self.listen(inputs, clock) as listener:
            out = self.inner.get_image_features(
                pixel_values=inputs["pixel_values"], return_dict=True, **self.given(inputs)
            )
        with clock.time("scoring"):
            encoded = self.crops(inputs, out.hidden_states, listener)
            return [self.single_crop(features, encoded, i) for i, features in enumerate(out.pooler_output)]

    def single_crop(
        self, features: Tensor, encoded: EncodedCrops, index: int, slots: int | None = None
    ) -> VisualTokens:
        """An image of one crop, the `index`-th of those encoded."""
        cell = torch.arange(len(features), device=features.device)
        side = encoded.side
        return VisualTokens(
            features,
            cell,
            encoded.scores[index],
            Layout(torch.zeros_like(cell), cell // side, cell % side),
            [(side, side)],
            len(features) if slots is None else slots,
            encoded.hidden[index],
            encoded.keys[index],
            encoded.cls_hidden[index : index + 1],
            encoded.cls_keys[index : index + 1],
            self.inner.multi_modal_projector,
        )


def projector_flops(config: Any) -> int:
    """FLOPs of the projector for one crop; takes the whole model's config. It sees every token: pruning comes after."""
    patches, extra = towers.tower_tokens(config.vision_config)
    tokens = patches + extra - (config.vision_feature_select_strategy == "default")
    layers = 1 if isinstance(config.vision_feature_layer, int) else len(config.vision_feature_layer)
    out = config.text_config.hidden_size
    return 2 * tokens * out * (layers * config.vision_config.hidden_size + out)
