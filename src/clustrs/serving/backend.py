"""Families without a class of their own here: vLLM's Transformers backend, with our adapter for encoding and scoring.

The model is the one of transformers, in which vLLM replaces the attention of the language model. An image's run of
placeholders, from the first to the last, has k of them after pruning, and one for each token of text in between (the
marks that some families write between tiles): how many tokens a tile keeps is known only when the image is encoded, so
that the rows of such text come with those of the image.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import Idefics3Processor
from vllm.model_executor.models.transformers import TransformersMultiModalForCausalLM
from vllm.model_executor.models.transformers import multimodal as backend
from vllm.model_executor.models.transformers.base import Base
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig

from clustrs.models.adapters.base import VisualTokens, adapter_class
from clustrs.models.adapters.qwen_vl import Qwen2VLAdapter
from clustrs.models.prompt import PrunedImage
from clustrs.serving import plugin, pruning

IDS = {"image": "clustrs_ids", "video": "clustrs_ids_video"}  # fields that bring ids of an unpruned run to the model


class PrunedBackendInfo(pruning.PrunedInfo, backend.MultiModalProcessingInfo):
    """Processing info of any family: images, and Qwen2-VL's videos."""

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        kinds = ("image", "video") if self.get_hf_config().model_type == "qwen2_vl" else ("image",)
        return dict.fromkeys(kinds)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
        """Return all tokens of the largest image or video: vLLM profiles the tower with as many images as unpruned."""
        most = {"image": self.get_max_image_tokens()}
        if "video" in self.get_supported_mm_limits():
            most["video"] = self.get_max_video_tokens(seq_len, mm_counts)
        return most

    def video_extent(self, frames: int, side: int, mm_kwargs: Any) -> int:
        return max(side, frames)

    def get_hf_processor(self, **kwargs: Any) -> Any:
        processor = super().get_hf_processor(**kwargs)
        if type(processor).__name__ == "SmolVLMProcessor" and not hasattr(processor, "_get_num_multimodal_tokens"):
            # It writes the prompts of Idefics3, but does not count their tokens.
            processor._get_num_multimodal_tokens = MethodType(Idefics3Processor._get_num_multimodal_tokens, processor)
        return processor

    def count_unpruned(self, **size: Any) -> int:
        """Return the number of placeholders, without the marks around tiles that the processors of some count, too."""
        processor = self.get_hf_processor()
        counted = self._get_num_mm_tokens(image_sizes=([size["image_height"], size["image_width"]],))
        for name in ("image_seq_len", "image_seq_length"):  # tokens of a tile: Idefics3 and SmolVLM, InternVL
            if hasattr(processor, name):
                return int(counted["num_image_patches"][0]) * int(getattr(processor, name))
        return int(counted["num_image_tokens"][0])

    def count_candidates(self, **size: Any) -> int:
        """Return the number of tokens without newlines, which the processor of LLaVA-NeXT counts apart."""
        processor = self.get_hf_processor()
        if not hasattr(processor, "_get_unpadded_features"):
            return self.count_unpruned(**size)
        unlined, count = copy.copy(processor), processor._get_unpadded_features
        unlined._get_unpadded_features = lambda *args, **given: (count(*args, **given)[0], 0)
        sizes = ([size["image_height"], size["image_width"]],)
        return int(unlined._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"][0])


class PrunedBackendProcessor(pruning.PrunedProcessor, backend.MultiModalProcessor):
    """Multimodal processor of any family: cuts the run of placeholders of each image."""

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Any) -> Any:
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs)
        for kind, name in IDS.items():
            if (ids := processed.get(f"{kind}_replacement_ids")) is not None:
                sizes = processed[f"{kind}_replacement_sizes"].tolist()
                processed[name] = [part.clone() for part in ids.split(sizes)]
        return processed

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> dict[str, Any]:
        hf_inputs.pop("attention_mask", None)
        theirs = {name: part for name, part in hf_inputs.items() if not name.startswith(plugin.KEY)}
        fields = super()._get_mm_fields_config(theirs, hf_processor_mm_kwargs)
        own = {name: MultiModalFieldConfig.batched(kind, keep_on_cpu=True) for kind, name in IDS.items()}
        return {**fields, **own}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        return [replace(one, replacement=partial(self._cut, one, mm_items)) for one in updates]

    def _cut(self, update: Any, mm_items: Any, index: int) -> Any:
        ids = list(update.replacement(index).full)
        token = backend._get_embed_token_id(torch.tensor(ids))
        if update.modality == "video":
            return pruning.cut_run(ids, token, self.info.method.count(ids.count(token)))
        size = mm_items["image"].get_image_size(index)
        shape = {"image_width": size.width, "image_height": size.height}
        if (counted := self.info.count_unpruned(**shape)) != ids.count(token):
            raise RuntimeError(f"the prompt has {ids.count(token)} placeholders for an image, expected {counted}")
        return pruning.cut_run(ids, token, self.info.get_num_image_tokens(**shape))


@MULTIMODAL_REGISTRY.register_processor(
    PrunedBackendProcessor, info=PrunedBackendInfo, dummy_inputs=backend.MultiModalDummyInputsBuilder
)
class PrunedTransformers(pruning.PrunedModel, TransformersMultiModalForCausalLM):
    """A model of transformers in vLLM that keeps k tokens of each image."""

    _select_item_kwargs: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        named = config.architectures
        config.architectures = [plugin.check_architectures(named)]  # vLLM renames weights by it
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            config.architectures = named
        self.adapter = adapter_class(config.model_type)(self.model)
        self.adapter.records = self.method.requirements()
        self.adapter.scoring_layer()  # an error now for a tower without scores
        self.has_mrope = isinstance(self.adapter, Qwen2VLAdapter)

    @classmethod
    def refused_options(cls, vllm_config: Any, original: bool) -> dict[str, bool]:
        model, compilation = vllm_config.model_config.multimodal_config, vllm_config.compilation_config
        return super().refused_options(vllm_config, original) | {
            "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size > 1,
            "enable_mm_embeds": model.enable_mm_embeds,
            "compile_mm_encoder": compilation.compile_mm_encoder,
        }

    def scoring_attention(self) -> None:
        """Return no module: the adapter records scores."""

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Encode and prune the images of a step, together where their pixels come in one tensor, or its videos."""
        kind = "video" if IDS["video"] in kwargs else "image"
        runs = [ids.flatten() for ids in kwargs.pop(IDS[kind])]
        self.start_step(kwargs.pop(pruning.KEEP[kind]))
        given = {name: part for name, part in kwargs.items() if not name.startswith(f"num_{kind}_")}
        if kind == "video" or isinstance(given["pixel_values"], Tensor):
            images = self.encode(given, runs)
        else:
            each = [self._select_item_kwargs(given, i, len(runs)) for i in range(len(runs))]
            one_by_one = [{**one, "pixel_values": torch.stack(list(one["pixel_values"]))} for one in each]
            images = [self.encode(one, [run])[0] for one, run in zip(one_by_one, runs, strict=True)]
        pruned = self.prune_images(images)
        rows = [self.rows(*parts) for parts in zip(images, runs, pruned, strict=True)]
        pruning.count_seconds(self.timer)
        return rows

    def encode(self, given: dict[str, Any], runs: Sequence[Tensor]) -> list[VisualTokens]:
        inputs = {**given, "input_ids": torch.cat(list(runs))[None]}
        on_device = {
            name: part.to(self.timer.device) if isinstance(part, Tensor) else part for name, part in inputs.items()
        }
        images = self.adapter.encode(on_device, self.timer)
        if len(images) != len(runs):
            raise RuntimeError(f"the adapter found {len(images)} images, expected {len(runs)}")
        return images

    def rows(self, image: VisualTokens, ids: Tensor, kept: PrunedImage) -> Tensor:
        """Return the kept tokens and the text between them, in the order of the prompt, with their places."""
        if self.has_mrope:
            places = torch.stack([image.layout.tile, image.layout.y, image.layout.x])[:, kept.own]
            return torch.cat([kept.features, pruning.offset_channels(places, kept.features.dtype)], -1)
        token, device = self.adapter.placeholder("image"), kept.features.device
        first, last = pruning.find_run(ids.tolist(), token)
        run = ids[first : last + 1].to(device)
        order, own = pruning.prompt_order(run == token, kept)
        text = Base.embed_input_ids(self, run[run != token]).to(kept.features.dtype)
        return self.placed(torch.cat([kept.features, text])[order], own)

    def place_of(self, feature: Any) -> tuple[int, int, int]:
        kind, position = feature.modality, feature.mm_position
        ids = feature.data[IDS[kind]].data.flatten().tolist()
        first, last = pruning.find_run(ids, self.adapter.placeholder(kind))
        extent = last - first + 1
        if self.has_mrope:
            _, *sides = feature.data[f"{kind}_grid_thw"].data.flatten().tolist()
            extent = int(max(sides)) // int(self.config.vision_config.spatial_merge_size)
        return position.offset + first, position.length - first - (len(ids) - 1 - last), extent

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        positions = self.original_positions(positions) + self.adapter.first_position
        positions = positions[:, None].contiguous() if positions.dim() == 2 else positions
        run_model: Any = super(backend.MultiModalMixin, self).forward  # its own would add an axis
        return run_model(input_ids, positions, intermediate_tensors, inputs_embeds)
