"""Processors on machines without torchvision, which their video half needs and their image half does not."""

from importlib.util import find_spec
from typing import Any

import transformers as tf


class LlavaOnevisionProcessor(tf.LlavaOnevisionProcessor):  # type: ignore[misc]
    """The processor for images only. It has the name of the whole one, so that what it saves reads as that."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        vision_feature_select_strategy: str | None = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        video_token: str = "<video>",
        vision_aspect_ratio: str = "anyres_max_9",
        **kwargs: Any,
    ) -> None:
        self.num_image_tokens = num_image_tokens
        self.vision_feature_select_strategy = vision_feature_select_strategy
        self.image_token = getattr(tokenizer, "image_token", None) or image_token
        self.video_token = getattr(tokenizer, "video_token", None) or video_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        self.vision_aspect_ratio = vision_aspect_ratio
        tf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Gemma4Processor(tf.Gemma4Processor):  # type: ignore[misc]
    """The processor for images and audio. It has the name of the whole one, so that what it saves reads as that."""

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
        self.image_seq_length = image_seq_length
        self.audio_seq_length, self.audio_ms_per_token = audio_seq_length, audio_ms_per_token
        for name in ("image_token", "image_token_id", "boi_token", "eoi_token"):
            setattr(self, name, getattr(tokenizer, name))
        for name in ("audio_token", "audio_token_id", "boa_token", "eoa_token"):
            setattr(self, name, getattr(tokenizer, name, None))
        self.video_token = "<|video|>"
        tokenizer.add_special_tokens({"additional_special_tokens": [self.video_token]})
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        tf.ProcessorMixin.__init__(self, feature_extractor, image_processor, tokenizer, chat_template=chat_template)


IMAGE_ONLY = {"llava_onevision": LlavaOnevisionProcessor, "gemma4": Gemma4Processor}
"""By model type: what stands in for the processor where torchvision is missing."""


def load_processor(source: str) -> Any:
    """A folder's or a hub id's processor; without its video half where that needs torchvision, which is missing."""
    if find_spec("torchvision") is None:
        config = tf.AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.model_type in IMAGE_ONLY:
            return IMAGE_ONLY[config.model_type].from_pretrained(source, trust_remote_code=False)
    return tf.AutoProcessor.from_pretrained(source, trust_remote_code=False)
