"""vLLM engines in this process, one at a time, and the same questions to transformers. Needs vLLM."""

import gc
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers as tf
from PIL import Image

from clustrs.embedded import model_folder
from clustrs.models.load import load_model
from clustrs.pruners.base import Pruner
from clustrs_models.smol_build import use_published_names

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"image": 3},
    "disable_log_stats": True,
}
NEW_TOKENS = 8
EMBEDDED = ("mini-llava", "mini-onevision")
RANDOM = ("llava-siglip", "onevision-clip")
"""The classes again with the other's tower and random weights."""


@dataclass(frozen=True)
class Output:
    """An answer's token ids, the length of its prompt, and the indices that were kept of each image, if any."""

    answer: tuple[int, ...]
    prompt: int
    indices: tuple[tuple[int, ...], ...] = ()


def question(text: str, images: int) -> list[dict[str, Any]]:
    content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


class InProcess:
    """A vLLM engine in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(str(folder), **options)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()

    @property
    def model(self) -> Any:
        (model,) = self.llm.apply_model(lambda model: model)
        return model

    def empty_caches(self) -> None:
        self.llm.reset_mm_cache()
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()


class Engine(InProcess):
    """A vLLM engine, and what its pruned model selects."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **{**OPTIONS, **options})

    def ask(self, text: str, images: Any, *, fresh: bool = True, cached: list[Any] | None = None) -> Output:
        """Ask about images, or embeddings [images, k, D]; not by `chat`, which leaves out the prompt's first token.

        Caches are emptied before if `fresh`; `cached` gets how many tokens of the prompt they had.
        """
        from vllm import SamplingParams

        prompt = self.prompt(text, len(images))
        if fresh:
            self.empty_caches()
        with recorded() as seen:
            sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            request = {"prompt": prompt, "multi_modal_data": {"image": images}}
            (out,) = self.llm.generate([request], sampling, use_tqdm=False)
        if cached is not None:
            cached.append(out.num_cached_tokens)
        return Output(tuple(out.outputs[0].token_ids), len(out.prompt_token_ids), tuple(seen))

    def prompt(self, text: str, images: int) -> str:
        tokenizer = self.llm.get_tokenizer()
        return str(tokenizer.apply_chat_template(question(text, images), add_generation_prompt=True, tokenize=False))


@contextmanager
def recorded() -> Iterator[list[tuple[int, ...]]]:
    """The indices of each image that anybody selects from in this process."""
    select, seen = Pruner.select, list[tuple[int, ...]]()

    def listening(self: Pruner, *args: Any, **options: Any) -> Any:
        selection = select(self, *args, **options)
        indices = selection.indices if selection.indices.dim() == 2 else selection.indices[None]
        seen.extend(tuple(image) for image in indices.tolist())
        return selection

    Pruner.select = listening  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Pruner.select = select  # type: ignore[method-assign]


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model, self.processor = load_model(str(folder))

    def ask(
        self, text: str, images: Sequence[Image.Image], method: Pruner | None, positions: Any = "original"
    ) -> Output:
        """Ask as vLLM does: every image with all its crops, however many a prompt has."""
        prompt = self.processor.apply_chat_template(question(text, len(images)), add_generation_prompt=True)
        inputs = self.processor(images=list(images), text=[prompt], return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        if method is None:
            out = self.model.generate(**inputs, **options)
            return Output(tuple(out[0, length:].tolist()), length)
        with method(self.model, positions=positions, attention="plain") as handle:
            out = handle.model.generate(**inputs, **options)
            last = handle.last
        kept = tuple(tuple(image.selection.indices.tolist()) for image in last)
        shorter = length - sum(image.placeholders - image.kept for image in last)
        return Output(tuple(out[0, length:].tolist()), shorter, kept)


def build_random(name: str, folder: Path) -> Path:
    """A class with the other one's tower, fewer layers and random weights, large enough to tell images apart."""
    family, tower = name.split("-")
    source = model_folder("mini-llava" if family == "llava" else "mini-onevision")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = tf.AutoConfig.from_pretrained(source)
    kinds = {"clip": tf.CLIPVisionConfig, "siglip": tf.SiglipVisionConfig}
    shape = {"image_size": 120, "patch_size": 12, "hidden_size": 64, "intermediate_size": 96}
    config.vision_config = kinds[tower](num_hidden_layers=3, num_attention_heads=4, **shape)
    strategy = config.vision_feature_select_strategy = "default" if tower == "clip" else "full"
    config.text_config.num_hidden_layers = 2
    config.text_config.layer_types = ["full_attention"] * 2
    extra = {"patch_size": 12, "num_additional_image_tokens": int(tower == "clip")}
    edges: dict[str, Any] = {"crop_size": {"height": 120, "width": 120}, "size": {"shortest_edge": 120}}
    if family == "onevision":
        config.image_grid_pinpoints = [[120 * y, 120 * x] for y in (1, 2, 3) for x in (1, 2, 3)]
        extra = {"num_image_tokens": 100 + int(tower == "clip")}
        edges = {"size": {"height": 120, "width": 120}, "image_grid_pinpoints": config.image_grid_pinpoints}
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text()) | {"vision_feature_select_strategy": strategy} | extra
    settings["image_processor"] |= edges
    file.write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    use_published_names(folder / "model.safetensors")
    return folder
