"""Processors on machines without torchvision, and the square padding of LLaVA-1.5's evaluation.

The video halves of processors need torchvision, their image halves do not.
"""

from typing import Any

import transformers as tf
from transformers import LlavaImageProcessorPil, ProcessorMixin
from transformers.image_utils import make_nested_list_of_images
from transformers.processing_utils import ProcessingKwargs


def image_only(whole: Any) -> Any:
    """A processor class without its video half, under the name of the whole one."""

    def get_attributes(cls: Any) -> list[str]:
        return [part for part in whole.get_attributes() if part != "video_processor"]

    return type(whole.__name__, (whole,), {"get_attributes": classmethod(get_attributes), "__doc__": whole.__doc__})


class SmolVLMProcessor(tf.SmolVLMProcessor):  # type: ignore[misc]
    """SmolVLM's processor for images only, under the name of the whole one. It does not need num2words, either."""

    def __init__(
        self, image_processor: Any, tokenizer: Any, image_seq_len: int = 169, chat_template: str | None = None, **_: Any
    ) -> None:
        tokens = {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
        }
        for name, token in tokens.items():
            setattr(self, name, getattr(tokenizer, name, token))
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.image_seq_len = image_seq_len
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:  # SmolVLM's own asks its video half
        return ProcessorMixin.apply_chat_template(self, *args, **kwargs)


class Gemma4ProcessorKwargs(ProcessingKwargs, total=False):  # type: ignore[call-arg, misc]
    _defaults = {  # noqa: RUF012
        "text_kwargs": {"padding": True, "return_mm_token_type_ids": True},
        "images_kwargs": {"do_convert_rgb": True},
        "audio_kwargs": {},
    }


class Gemma4Processor(ProcessorMixin):  # type: ignore[misc]
    """Gemma 4's processor for images and sound, under the name of transformers' own, so that what it saves reads as
    that. That one cannot be extended: in transformers 5.18 it cannot even be imported without torchvision."""

    valid_processor_kwargs = Gemma4ProcessorKwargs

    def __init__(
        self,
        feature_extractor: Any,
        image_processor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
        image_seq_length: int = 280,
        audio_seq_length: int = 750,
        audio_ms_per_token: int = 40,
        **kwargs: Any,
    ) -> None:
        self.image_seq_length, self.audio_seq_length = image_seq_length, audio_seq_length
        self.audio_ms_per_token = audio_ms_per_token
        for name in ("image_token", "image_token_id", "boi_token", "eoi_token"):
            setattr(self, name, getattr(tokenizer, name))
        for name in ("audio_token", "audio_token_id", "boa_token", "eoa_token"):
            setattr(self, name, getattr(tokenizer, name, None))
        self.video_token = "<|video|>"
        tokenizer.add_special_tokens({"additional_special_tokens": [self.video_token]})
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        super().__init__(feature_extractor, image_processor, tokenizer, chat_template=chat_template)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **inputs: Any) -> tuple[Any, ...]:
        images, text, videos, audio = super().prepare_inputs_layout(images=images, text=text, **inputs)
        return None if images is None else make_nested_list_of_images(images), text, videos, audio

    def validate_inputs(self, images: Any = None, text: Any = None, videos: Any = None, **inputs: Any) -> None:
        if videos is not None:
            raise ValueError("videos: they need torchvision, which is not installed")
        if text is None:
            raise ValueError("text is missing, expected a prompt for the images")
        places = [prompt.count(self.image_token) for prompt in text]
        given = [len(row) for row in images] if images is not None else [0] * len(text)
        if places != given:
            raise ValueError(f"images: the prompts have {places} times {self.image_token}, got {given} images")
        super().validate_inputs(images=images, text=text, videos=videos, **inputs)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        count = int(image_inputs["num_soft_tokens_per_image"][image_idx])
        return f"{self.boi_token}{self.image_token * count}{self.eoi_token}"

    def replace_audio_token(self, audio_inputs: Any, audio_idx: int, **_: Any) -> str:
        count = int(audio_inputs["input_features_mask"][audio_idx][::4].sum())  # two convolutions leave every fourth
        return f"{self.boa_token}{self.audio_token * count}{self.eoa_token}"

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]

    @property
    def unused_input_names(self) -> list[str]:
        return ["num_soft_tokens_per_image"]


LlavaOnevisionProcessor: Any = image_only(tf.LlavaOnevisionProcessor)
InternVLProcessor: Any = image_only(tf.InternVLProcessor)
IMAGE_ONLY: dict[str, Any] = {  # by model type: what stands in for the processor where torchvision is missing
    "llava_onevision": LlavaOnevisionProcessor,
    "internvl": InternVLProcessor,
    "smolvlm": SmolVLMProcessor,
    "gemma4": Gemma4Processor,
    "qwen2_vl": image_only(tf.Qwen2VLProcessor),
    "qwen2_5_vl": image_only(tf.Qwen2_5_VLProcessor),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), image_only(tf.Qwen3VLProcessor)),
}
MAX_PADDED_SIDE = 10_000  # pixels: a strip of 65,500 x 2 pixels would need 12 GB as a square


class SquareImageProcessor(LlavaImageProcessorPil):  # type: ignore[misc]
    """Pads images to a square with the mean color before they are resized."""

    def pad_to_square(self, image: Any, background_color: Any = 0) -> Any:
        height, width = image.shape[1:]
        if max(height, width) > MAX_PADDED_SIDE:
            wanted = f"image must have sides of at most {MAX_PADDED_SIDE} pixels to be padded to a square"
            raise ValueError(f"{wanted}, got {width} x {height}")
        return super().pad_to_square(image, background_color)
