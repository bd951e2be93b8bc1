"""Check that an installed vLLM has the interfaces that the plugin uses. Its source is read, nothing is imported."""

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

TESTED = "0.32.0"  # version of vLLM that the tests run with
PROCESSOR = "multimodal.processing.processor"
BACKEND = "model_executor.models.transformers.multimodal"
# What each module of vLLM must define. Parentheses hold the arguments that we pass, or vLLM passes to an override.
INTERFACES: dict[str, tuple[str, ...]] = {
    "config.model": ("ModelConfig.get_model_arch_config()", "ModelConfig.uses_mrope()", "ModelConfig.model_impl"),
    "model_executor.models.registry": (
        "_ModelRegistry.register_model(model_arch, model_cls)",
        "_ModelRegistry.get_supported_archs()",
    ),
    "model_executor.models.config": ("MODELS_CONFIG_MAP",),
    "model_executor.models.qwen3_5": (
        "Qwen3_5ProcessingInfo",
        "Qwen3_5MoeProcessingInfo",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "multimodal.registry": ("MultiModalRegistry.register_processor(processor, info, dummy_inputs)",),
    "multimodal.inputs": (
        "MultiModalFieldConfig.batched(modality, keep_on_cpu)",
        "MultiModalFieldConfig.flat_from_sizes(modality, size_per_item, keep_on_cpu)",
        "PlaceholderRange.offset",
        "PlaceholderRange.length",
        "MultiModalFeatureSpec.data",
        "MultiModalFeatureSpec.mm_position",
    ),
    PROCESSOR: (
        "BaseMultiModalProcessor.apply(inputs, timing_ctx)",
        "BaseMultiModalProcessor.get_dummy_mm_inputs(mm_counts, cache, scheduler_config)",
        "BaseMultiModalProcessor._get_mm_hashes(inputs)",
        "BaseMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "BaseMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "BaseMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        "PromptUpdateDetails.select_token_id(seq, embed_token_id)",
    ),
    "multimodal.processing.inputs": ("ProcessorInputs.hf_processor_mm_kwargs", "ProcessorInputs.mm_data_items"),
    "multimodal.processing.context": (
        "BaseProcessingInfo.model_id()",
        "BaseProcessingInfo.get_supported_mm_limits()",
        "BaseProcessingInfo.get_mm_max_tokens_per_item(seq_len, mm_counts)",
    ),
    "renderers.online_renderer": ("validate_request_mm_kwargs",),
    "entrypoints.generate.base.protocol": (
        "validate_request_mm_kwargs(mm_processor_kwargs, media_io_kwargs, trust_request_mm_kwargs)",
    ),
    "exceptions": ("VLLMValidationError.__init__(message, parameter)",),
    "model_executor.models.interfaces": (
        "SupportsMultiModal.embed_multimodal(kwargs)",
        "SupportsMRoPE.get_mrope_input_positions(input_tokens, mm_features)",
    ),
    "model_executor.layers.rotary_embedding.base": ("RotaryEmbeddingBase._compute_cos_sin_cache()",),
    "model_executor.models.llava": (
        "LlavaProcessingInfo",
        "LlavaMultiModalProcessor",
        "LlavaDummyInputsBuilder",
        "LlavaForConditionalGeneration._process_image_input(image_input)",
        "LlavaForConditionalGeneration._image_pixels_to_features(vision_tower, pixel_values)",
        "LlavaForConditionalGeneration.forward(input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)",
    ),
    "model_executor.models.llava_onevision": (
        "LlavaOnevisionProcessingInfo._get_num_unpadded_features("
        "original_height, original_width, npatches, num_patch_height, num_patch_width)",
        "LlavaOnevisionMultiModalProcessor",
        "LlavaOnevisionDummyInputsBuilder",
        "LlavaOnevisionForConditionalGeneration._process_image_input(image_input)",
        "LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings("
        "image_size, patch_embeddings, image_newline, strategy)",
    ),
    "model_executor.models.qwen2_vl": (
        "Qwen2VLProcessingInfo._get_vision_info(image_width, image_height, image_processor, mm_kwargs)",
        "Qwen2VLProcessingInfo.get_max_video_tokens(seq_len, mm_counts)",
    ),
    "model_executor.models.qwen2_5_vl": (
        "Qwen2_5_VLProcessingInfo",
        "Qwen2_5_VLMultiModalProcessor",
        "Qwen2_5_VLDummyInputsBuilder",
        "Qwen2_5_VLForConditionalGeneration._process_image_input(image_input)",
        "Qwen2_5_VLForConditionalGeneration._process_video_input(video_input)",
        "Qwen2_5_VisionTransformer.get_window_index_thw(grid_t, grid_h, grid_w)",
    ),
    "model_executor.models.qwen3_vl": (
        "Qwen3VLProcessingInfo",
        "Qwen3VLMultiModalProcessor.get_video_repl("
        "tokens_per_frame, timestamps, tokenizer, vision_start_token_id, vision_end_token_id, video_token_id)",
        "Qwen3VLDummyInputsBuilder",
        "Qwen3VLForConditionalGeneration._process_image_input(image_input)",
        "Qwen3VLForConditionalGeneration._process_video_input(video_input)",
    ),
    "model_executor.models.qwen3_vl_moe": ("Qwen3VLMoeProcessingInfo", "Qwen3VLMoeForConditionalGeneration"),
    "model_executor.models.gemma4_mm": (
        "_get_max_soft_tokens(merged_kwargs)",
        "Gemma4ProcessingInfo._compute_num_soft_tokens(image_width, image_height, max_soft_tokens)",
        "Gemma4MultiModalProcessor",
        "Gemma4DummyInputsBuilder",
        "Gemma4ForConditionalGeneration._process_image_input(image_input)",
    ),
    "multimodal.parse": ("VideoProcessorItems.get_frame_size(item_idx)",),
    BACKEND: (
        "MultiModalProcessingInfo._get_num_image_tokens(size)",
        "MultiModalProcessingInfo.get_max_image_tokens()",
        "MultiModalProcessingInfo.get_max_video_tokens(seq_len, mm_counts)",
        "MultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        "MultiModalDummyInputsBuilder",
        "MultiModalMixin.forward(input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)",
        "MultiModalMixin.embed_multimodal(kwargs)",
        "MultiModalMixin.get_mrope_input_positions(input_tokens, mm_features)",
    ),
    "model_executor.models.transformers": ("TransformersMultiModalForCausalLM",),
}


def check_interfaces(version: str) -> None:
    """Raise ValueError that names what the installed vLLM lacks of what the plugin uses, or has changed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vLLM is not installed")
    if changed := changes(Path(spec.submodule_search_locations[0])):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = f"{'; '.join(changed[:3])}{more}"
        raise ValueError(f"vLLM {version} lacks what the plugin uses: {what} (tested: pip install vllm=={TESTED})")


@functools.cache
def changes(root: Path) -> list[str]:
    """Return what differs in the source of vLLM in a folder from `INTERFACES`, each in a few words."""
    found = []
    for module, wanted in INTERFACES.items():
        file = root / f"{module.replace('.', '/')}.py"
        file = file if file.is_file() else root / module.replace(".", "/") / "__init__.py"
        if not file.is_file():
            found.append(f"module vllm.{module} is gone")
            continue
        defined = dict(_defined(ast.parse(file.read_text(encoding="utf-8")).body))
        for name, _, arguments in (one.partition("(") for one in wanted):
            if name not in defined:
                found.append(f"vllm.{module}.{name} is gone")
                continue
            ours, (theirs, needed) = set(arguments.rstrip(")").replace(",", " ").split()), defined[name]
            if arguments and (missing := ours - theirs):
                found.append(f"vllm.{module}.{name} takes no {' and no '.join(sorted(missing))}")
            if arguments and (new := needed - ours):
                found.append(f"vllm.{module}.{name} needs {' and '.join(sorted(new))}")
    return found


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, tuple[set[str], set[str]]]]:
    """Yield names that a module or class defines, each with its arguments and with those that have no default."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            positional = [one.arg for one in (*given.posonlyargs, *given.args) if one.arg not in ("self", "cls")]
            by_name = {one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
            needed = {*positional[: max(0, len(positional) - len(given.defaults))]}
            needed |= {name for name, value in by_name.items() if value is None}
            rest = {one.arg for one in (given.vararg, given.kwarg) if one is not None}
            yield prefix + node.name, ({*positional, *by_name, *rest}, needed)
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name, (set(), set())
            yield from _defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((prefix + (one.asname or one.name), (set(), set())) for one in node.names)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from ((prefix + one.id, (set(), set())) for one in targets if isinstance(one, ast.Name))
